"""The command `outrider init`: its inputs, the recipe that it writes, and a run of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma3nTextConfig,
    GPT2Config,
    LongcatFlashConfig,
    MptConfig,
    NemotronHConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from outrider.cli.compose import load_recipe
from outrider.cli.config import RunConfig
from outrider.cli.init import MAX_SHARE, InitOptions, eagle3_layers, init_command, kinds, recipe_text
from outrider.cli.init_facts import NUM_PROMPTS, DataFacts, TargetFacts, read_data_facts, read_target_facts
from outrider.cli.run import require_trainable, run
from outrider.models.drafters import DRAFTERS
from outrider.models.drafters.fused_layers import default_feature_layers
from outrider.models.llm.loading import load_target

from ..cheap_evaluations import cheap_evaluations
from ..tiny_models import save_tiny_target

__all__ = ["cheap_evaluations"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen3(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Qwen3 of six layers with a chat template."""
    sizes = {"num_hidden_layers": 6, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2}
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_target(folder, Qwen3ForCausalLM, Qwen3Config, tiny_tokenizer, **sizes)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write_chats(path: Path, number: int = 30) -> Path:
    records = [
        {"messages": [{"role": "user", "content": f"Count to {i}."}, {"role": "assistant", "content": "1 2 3 4 5 6"}]}
        for i in range(number)
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def init(recipe: Path, target: Path | str, number: int = 30, **options: Any) -> None:
    """Write a recipe for a target and so many texts."""
    chats = write_chats(recipe.parent / "chats.jsonl", number)
    init_command(InitOptions(recipe=recipe, target=str(target), data=chats, **options))


def config_of(recipe: Path, *overrides: str) -> RunConfig:
    return load_recipe(str(recipe), *overrides)


@pytest.mark.parametrize("drafter", kinds())
def test_a_written_recipe_composes_from_any_folder_and_fits_the_target(drafter, qwen3, tmp_path, monkeypatch):
    init(tmp_path / "my.yaml", qwen3, drafter=drafter)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = config_of(tmp_path / "my.yaml", "train.steps=20")
    kind = drafter.removesuffix("_dspark")
    assert (config.name, config.drafter["kind"], config.target.name_or_path) == ("my", kind, str(qwen3))
    assert (config.data.source, config.data.path, config.data.split) == ("messages", str(tmp_path / "chats.jsonl"), "train")
    assert config.data.max_length < 256
    assert (config.eval.baselines, config.eval.merge) == (["prompt_lookup", "suffix", "recycling"], ["suffix", "recycling"])
    (suite,) = config.eval.suites
    assert (suite.name, Path(suite.path or "").name) == ("held_out", "my.prompts.jsonl")
    assert config_of(tmp_path / "my").train.steps == 100
    # No error before the training, and a warning only where no format holds the drafter.
    warnings = require_trainable(config, load_target(str(qwen3), torch.device("cpu")))
    assert [warning.split(" will")[0] for warning in warnings] == ([] if config.export.formats else ["no serving engine"])
    # The header's first try is a command of this recipe.
    (command,) = (line for line in (tmp_path / "my.yaml").read_text().splitlines() if "output_dir=" in line)
    assert config_of(tmp_path / "my.yaml", *command.split()[4:]).data.limit == 20


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_targets_with_recurrent_layers_are_labelled_along_the_text(is_recurrent, tmp_path):
    for drafter in kinds():
        config = written(drafter, LARGE | {"is_recurrent": is_recurrent}, tmp_path)
        assert config.distill.branches is not is_recurrent


@pytest.mark.parametrize(
    ("has_head", "init", "rate", "formats"), [(True, "target", 1e-4, ["mtp"]), (False, "random", 1e-3, [])]
)
def test_an_mtp_head_starts_from_the_checkpoints_own_if_it_has_one(has_head, init, rate, formats, tmp_path):
    config = written("mtp", LARGE | {"has_mtp_head": has_head}, tmp_path)
    assert (config.drafter["init"], config.train.learning_rate, config.export.formats) == (init, rate, formats)


def test_every_kind_can_be_written() -> None:
    assert {kind.removesuffix("_dspark") for kind in kinds()} == set(DRAFTERS)


SMALL = {"hidden_size": 576, "num_layers": 30, "vocab_size": 49_152, "layer_parameters": 3_540_000, "model_type": "llama"}
LARGE = {"hidden_size": 4096, "num_layers": 36, "vocab_size": 151_936, "layer_parameters": 192_900_000, "model_type": "qwen3"}


def written(drafter: str, sizes: dict[str, Any], tmp_path: Path, *, has_accelerator: bool = True) -> RunConfig:
    """Write a recipe for a target of these sizes, whose weights don't exist."""
    target = TargetFacts(
        name_or_path="org/model",
        description="a model",
        positions=8192,
        unused_token=16,
        chat_template=None,
        template_reason="",
        template_options=[],
        has_accelerator=has_accelerator,
        **sizes,
    )
    chats = write_chats(tmp_path / "chats.jsonl", 1)
    data = DataFacts(source="messages", path=chats, num_records=20_125, prompts=[], overlap_words=13)
    (tmp_path / "my.yaml").write_text(recipe_text(Path("my.yaml"), drafter, target, data, tmp_path / "my.prompts.jsonl"))
    return config_of(tmp_path / "my.yaml")


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_a_pass_of_a_drafter_reads_a_small_share_of_the_target(sizes: dict[str, Any], tmp_path: Path) -> None:
    hidden, layer, vocabulary = sizes["hidden_size"], sizes["layer_parameters"], sizes["vocab_size"]
    room = MAX_SHARE * (sizes["num_layers"] * layer + hidden * vocabulary)
    eagle3 = written("eagle3", sizes, tmp_path).drafter
    assert layer + hidden * eagle3["draft_vocab_size"] < room
    width = written("redrafter", sizes, tmp_path).drafter["exit_width"]
    assert width * vocabulary + 2 * width * (hidden + width) + 2 * hidden**2 < room
    medusa = written("medusa", sizes, tmp_path).drafter
    assert 4 * hidden**2 + (medusa["head_rank"] or hidden) * (hidden + vocabulary) < 1.1 * room
    block = written("block", sizes, tmp_path).drafter
    assert block["num_layers"] == (5 if sizes is LARGE else 1)
    assert layer + hidden * block["draft_vocab_size"] < room


def test_a_machine_without_a_gpu_gets_less_data(tmp_path: Path) -> None:
    with_gpu, without = (written("eagle3", SMALL, tmp_path, has_accelerator=has_gpu) for has_gpu in (True, False))
    assert (with_gpu.data.limit, with_gpu.data.max_length, with_gpu.target.dtype) == (None, 2048, "auto")
    assert (without.data.limit, without.data.max_length, without.target.dtype) == (1000, 512, "float32")
    assert without.train.steps == 250 < with_gpu.train.steps


@pytest.mark.slow
def test_a_written_recipe_runs_to_the_end(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init_command(InitOptions(recipe=Path("my"), target=str(qwen3), data=write_chats(tmp_path / "chats.jsonl")))
    few = ["train.steps=6", "eval.repeats=1", "eval.max_new_tokens=8", "eval.profile_prompts=0"]
    run(config_of(Path("my.yaml"), *few, "num_threads=1"))
    rows = json.loads((tmp_path / "outputs/my/eval/summary.json").read_text())
    assert len(rows) == 1 + 3 + 2 + 1, "plain decoding, what needs no training, two settings, and the merge"
    manifest = json.loads((tmp_path / "outputs/my/distill/manifest.json").read_text())
    assert sum(len(shard["ids"]) for shard in manifest["shards"]) == 30 - 3, "three are held out"


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (GPT2Config(), (768, 12, 50_257, 1024)),
        (BloomConfig(hidden_size=64, n_layer=3, vocab_size=99), (64, 3, 99, 4096)),
        (MptConfig(d_model=64, n_layers=5, vocab_size=99), (64, 5, 99, 2048)),
        (NemotronHConfig(), (4096, 4, 131_072, 4096)),
        (Gemma3nTextConfig(), (2048, 35, 262_400, 32_768)),  # its layers have a width each
        (LongcatFlashConfig(), (6144, 28, 131_072, 131_072)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sizes_are_found_under_the_names_of_each_family(config, facts, qwen3, tmp_path):
    folder = Path(shutil.copytree(qwen3, tmp_path / "target"))
    config.save_pretrained(folder)
    found = read_target_facts(str(folder), None)
    assert (found.hidden_size, found.num_layers, found.vocab_size, found.positions) == facts
    assert found.layer_parameters > 8 * found.hidden_size**2


def test_nothing_is_overwritten(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("mine")
    with pytest.raises(ValueError, match=r"my\.yaml exists"):
        init(tmp_path / "my.yaml", qwen3)
    assert (tmp_path / "my.yaml").read_text() == "mine"


@pytest.mark.parametrize("layers", [1, 2, 4, 8, 32, 36])
def test_feature_layers_are_the_drafters_default(layers: int) -> None:
    layers_read, _, formats = eagle3_layers(layers)
    assert layers_read == default_feature_layers(layers) or formats == ["speculators"]


@pytest.mark.parametrize(("layers", "usual"), [(2, None), (3, "speculators"), (6, "speculators"), (7, "eagle3")])
def test_an_eagle3_for_a_shallow_target_is_exportable_or_the_recipe_says_that_it_isnt(layers, usual, qwen3, tmp_path):
    config = json.loads((qwen3 / "config.json").read_text()) | {"num_hidden_layers": layers, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    init(tmp_path / "a.yaml", tmp_path, chat_template="vicuna_v1.1")
    written = config_of(tmp_path / "a.yaml")
    assert bool(written.export.formats) == (usual is not None)
    assert usual is None or f"formats: [{usual}]" in (tmp_path / "a.yaml").read_text()
    chosen = written.drafter["feature_layers"]
    assert (len(set(chosen)) == 3) == (usual is not None)
    assert max(chosen) < layers


def test_a_large_vocabulary_makes_a_smaller_head(qwen3: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    config = json.loads((qwen3 / "config.json").read_text()) | {"vocab_size": 151_936, "max_position_embeddings": 40_960}
    (large / "config.json").write_text(json.dumps({"text_config": config}))
    (large / "chat_template.jinja").write_text("{{ enable_thinking }}")
    init(tmp_path / "large.yaml", large, 400)
    config = config_of(tmp_path / "large.yaml")
    assert config.drafter["draft_vocab_size"] == 8_000, "a tenth of the tiny target has no room for more"
    assert config.drafter["feature_layers"] == [1, 3, 5]
    assert (config.data.chat_template, config.data.template_options) == (None, {})
    assert "the template reads enable_thinking" in (tmp_path / "large.yaml").read_text()
    assert (config.train.steps, config.train.global_batch_size) == (100, 16)


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        ("./nowhere", "eagle3", "no such directory"),
        ("{empty}", "eagle3", "no config.json"),
        ("{t5}", "eagle3", "describes an encoder with a decoder; it must be that of a causal language model"),
        ("{bare}", "eagle3", "no chat template.*vicuna_v1.1"),
        ("{qwen3}", "eagel3", "must be one of block"),
    ],
)
def test_a_recipe_that_cannot_be_written_is_an_error(target, drafter, message, qwen3, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text((qwen3 / "config.json").read_text())
    T5Config().save_pretrained(tmp_path / "t5")
    folder = target.format(empty=tmp_path / "empty", bare=tmp_path / "bare", t5=tmp_path / "t5", qwen3=qwen3)
    with pytest.raises(ValueError, match=message):
        init(tmp_path / "my.yaml", folder, drafter=drafter)
    assert not (tmp_path / "my.yaml").exists()


def test_init_takes_a_chat_template_for_a_tokenizer_without_one(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    assert read_target_facts(str(tmp_path), "vicuna_v1.1").chat_template == "vicuna_v1.1"
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert read_target_facts(str(tmp_path), str(tmp_path / "mine.jinja")).chat_template == str(tmp_path / "mine.jinja")
    with pytest.raises(ValueError, match="chat_template is 'no_such_template'"):
        read_target_facts(str(tmp_path), "no_such_template")


SHAREGPT = {"conversations": [{"from": "human", "value": "Hi {i}"}, {"from": "gpt", "value": "Hello"}]}
ALPACA = {"instruction": "Say {i}", "input": "", "output": "it"}


@pytest.mark.parametrize(
    ("record", "source", "first"),
    [(SHAREGPT, "sharegpt", "Hi "), (ALPACA, "alpaca", "Say "), ({"text": "words"}, "text", None)],
)
def test_init_detects_the_format_of_the_records(record, source, first, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([json.loads(json.dumps(record).replace("{i}", str(i))) for i in range(400)]))
    facts = read_data_facts(path, max_chars=100)
    assert (facts.source, facts.num_records) == (source, 400)
    assert len(facts.prompts) == (NUM_PROMPTS if first else 0)
    assert all(prompt["turns"][0].startswith(first or "") for prompt in facts.prompts)


def test_text_and_data_without_prompts_to_spare_have_no_held_out_prompts(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("words")
    assert read_data_facts(tmp_path / "words.txt", 100).source == "text"
    same = tmp_path / "same.jsonl"
    same.write_text((json.dumps(ALPACA) + "\n") * 20)
    assert read_data_facts(same, 100).prompts == []
    (tmp_path / "odd.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match="first record has the keys question"):
        read_data_facts(tmp_path / "odd.jsonl", 100)


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("a.jsonl", {"messages": "hi"}, r"a\.jsonl, line 2: 2 x record without a list 'messages'"),
        ("a.jsonl", {"messages": [{"role": "user", "content": "hi"}]}, r"a\.jsonl, line 2: 2 x no assistant turn"),
        ("a.jsonl", {"text": 1}, r"a\.jsonl, line 2: .*text"),
        ("a.txt", ALPACA, r"rename it to a\.jsonl"),
        ("a.bin", "\0", r"a\.bin, which is not UTF-8 text"),
    ],
)
def test_records_that_cannot_be_trained_on_are_an_error_of_init(name, record, message, tmp_path):
    line = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / name).write_text(f"\n{line}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_data_facts(tmp_path / name, 100)


def test_init_looks_at_more_than_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [{"meta": 1}, *[ALPACA] * 3])))
    assert read_data_facts(tmp_path / "a.jsonl", 100).source == "alpaca"


def test_a_damaged_config_is_named_and_an_empty_part_ignored(qwen3: Path, tmp_path: Path) -> None:
    text = (qwen3 / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | {"text_config": None}))
    assert read_target_facts(str(tmp_path), "vicuna_v1.1").num_layers == 6
    (tmp_path / "config.json").write_text(text[:40])
    with pytest.raises(ValueError, match="config.json is not a JSON file"):
        read_target_facts(str(tmp_path), "vicuna_v1.1")


def test_the_printed_command_can_be_pasted(qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my runs").mkdir()
    init(tmp_path / "my runs/a.yaml", qwen3, 1)
    printed = capsys.readouterr().out
    assert f"outrider run '{tmp_path}/my runs/a.yaml' --plan" in printed
    assert "on 1 record (messages)" in printed
    assert "limit: null # null: the whole data, 1 record" in (tmp_path / "my runs/a.yaml").read_text().replace(
        "without a GPU; ", ""
    )


def test_a_recipe_is_written_without_torch(qwen3: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    script = "import sys\nfrom outrider.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, "init", "my.yaml", "--target", str(qwen3), "--data", "chats.jsonl"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "outrider run my.yaml --plan" in result.stdout
