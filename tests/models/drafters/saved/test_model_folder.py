"""A model of transformers that drafts as it is: `draft_model:DIR`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.files import read_json, write_json
from outrider.eval.tune.run import settings_to_try
from outrider.models.decoding import GreedyAcceptance
from outrider.models.decoding.loop import generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.merged import MergedDrafter
from outrider.models.drafters.saved.loading import describe_setup, tuned_folder
from outrider.models.drafters.saved.parts import DrafterParts, parse_drafter_name
from outrider.models.export import custom_generate
from outrider.models.export.formats import write_folder
from outrider.models.export.package import make_package
from outrider.models.export.transformers_model import FORMAT
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.identity import weights_digest
from outrider.models.llm.loading import load_target

from ....decoded import answers_of
from ....tiny_models import save_tiny_target


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Path:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.2}
    return save_tiny_target(folder, LlamaForCausalLM, LlamaConfig, tokenizer, **{**sizes, **options})


@pytest.fixture(scope="module")
def sibling(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small+er", tiny_tokenizer, dtype="bfloat16")


@pytest.fixture
def changed(sibling, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sibling, tmp_path / "changed"))


def answer(target, drafter) -> list[int]:
    return answers_of(target, drafter, [[1, 70, 71, 72, 70, 71]], 24)[0]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_drafts_alone_and_in_a_merge_and_changes_no_token(target, sibling, tiny_target_dir):
    plain, before = answer(target, NullDrafter()), files_of(sibling)
    drafter = load_drafter(f"draft_model:{sibling}", target, length=3, top_k=2)
    assert isinstance(drafter, DraftModel)
    assert {parameter.dtype for parameter in drafter.parameters()} == {target.dtype}
    assert (drafter.config.length, drafter.config.top_k, drafter.reader.model.config.hidden_size) == (3, 2, 16)
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert answer(target, drafter) == plain
    merged = load_drafter(f"suffix+draft_model:{sibling}", target, length=2, pace="fixed", tree_nodes=5)
    assert isinstance(merged, MergedDrafter)
    assert merged.sources["draft_model"].config.length == 2
    assert answer(target, merged) == plain
    assert files_of(sibling) == before, "the folder is only read"
    # The target as its own draft model: all drafts are right, so the weights are the model's.
    same = load_drafter(f"draft_model:{tiny_target_dir}", target, length=3)
    steps = list(generate(target, same, GreedyAcceptance(), torch.tensor([[1, 70, 71]]), max_new_tokens=13))
    assert len(steps) == 4


@pytest.mark.parametrize("vocab_size", [300, 325])
def test_a_vocabulary_that_is_padded_differently_is_fitted(vocab_size, tiny_tokenizer, tmp_path):
    """The common tokens are drafted as before; a token that only the target has is an average token."""
    options = {"dtype": "float64", "vocab_size": 310, "num_hidden_layers": 2}
    name = str(make_model(tmp_path / "target", tiny_tokenizer, **options))
    target = load_target(TargetConfig(name_or_path=name, dtype="float64", device="cpu"))
    options = {"vocab_size": vocab_size, "pad_token_id": vocab_size - 1, "tie_word_embeddings": vocab_size == 300}
    folder = make_model(tmp_path / "model", tiny_tokenizer, **options)
    text, unknown = torch.tensor([[1, 70, 71, 72, 70, 71]]), torch.tensor([[1, 309]])
    expected, common = AutoModelForCausalLM.from_pretrained(folder).double()(text).logits, min(310, vocab_size)
    trained = build_drafter(parse_drafter({"kind": "draft_model", "path": str(folder)}), target)
    save_drafter(trained, tmp_path / "saved", target.identity)
    plain = answer(target, NullDrafter())
    for drafter in (load_drafter(f"draft_model:{folder}", target), load_drafter(tmp_path / "saved", target), trained.double()):
        logits = drafter.reader.model(text).logits
        assert torch.allclose(logits[..., :common], expected[..., :common], atol=1e-5)
        assert torch.allclose(logits[..., common:], expected.mean(-1, keepdim=True).expand(-1, -1, 310 - common), atol=1e-5)
        assert drafter.reader.model(unknown).logits.isfinite().all()
        assert answer(target, drafter.eval()) == plain
        assert next(generate(target, drafter, GreedyAcceptance(), unknown, max_new_tokens=4)).is_prefill
    assert answer(target, load_drafter(f"suffix+draft_model:{folder}", target)) == plain
    write_folder(FORMAT, trained, tmp_path / "export", target)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").get_input_embeddings().num_embeddings == 310


def test_records_identify_a_model_by_the_digest_of_its_weights_and_hold_no_path(target, sibling, changed):
    parts = parse_drafter_name(f"draft_model:{sibling}+suffix")
    assert parts.kind == "draft_model+suffix"
    assert parts.weights == weights_digest(str(sibling), None)
    assert parse_drafter_name(f"draft_model:{changed}").weights == parts.weights, "a folder may move"
    described = parts.described({})
    assert str(sibling) not in str(described)
    assert described["draft_model"]["architecture"]["hidden_size"] == 16
    assert describe_setup(target, parts).drafter == f"{parts.weights[:16]}+suffix"
    LlamaForCausalLM(LlamaConfig.from_pretrained(changed)).save_pretrained(changed)
    assert parse_drafter_name(f"draft_model:{changed}").weights != parts.weights


def test_tuning_has_settings_for_a_model_and_no_folder_to_write_to(sibling):
    parts = parse_drafter_name(f"draft_model:{sibling}")
    assert len(settings_to_try(parts)) > 5
    with pytest.raises(ValueError, match="draft_model:.* has no folder that outrider writes to.*--no-write"):
        tuned_folder(parts)


def test_only_drafting_options_can_be_set(sibling):
    parts = parse_drafter_name(f"draft_model:{sibling}")
    assert parts.configs({"length": 7})["draft_model"].length == 7
    with pytest.raises(ValueError, match="num_layers can't be changed"):
        parts.configs({"num_layers": 7})
    with pytest.raises(ValueError, match="drafter.length=0: must be above 0"):
        parts.configs({"length": 0})


def test_a_model_isnt_packaged(sibling, tmp_path):
    with pytest.raises(ValueError, match="drafts with a model of transformers as it is.*package the other parts"):
        make_package(parse_drafter_name(f"draft_model:{sibling}+suffix"), tmp_path / "package", "# Card\n")


def test_the_generate_of_packages_drafts_with_a_model(tiny_target_dir, sibling):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()
    options = {"input_ids": torch.tensor([[1, 70, 71, 72]]), "max_new_tokens": 12}
    tokens = custom_generate.generate(model, drafter=f"draft_model:{sibling}", drafter_options={"length": 2}, **options)
    assert torch.equal(tokens, model.generate(**options))


def test_another_vocabulary_or_tokenizer_is_an_error_before_weights_are_read(target, sibling, changed, tmp_path):
    for path in changed.glob("*.safetensors"):
        path.write_bytes(b"")
    write_json(changed / "config.json", {**read_json(changed / "config.json"), "vocab_size": 400})
    with pytest.raises(ValueError, match="vocabulary of 400 tokens and .* one of 300.*same family"):
        load_drafter(f"draft_model:{changed}", target)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({f"t{index}": index for index in range(300)}, [])))
    shutil.copytree(sibling, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="the draft model other has another tokenizer"):
        load_drafter(f"draft_model:{tmp_path / 'other'}", target)


def test_a_tokenizer_is_loaded_with_the_targets_options(tiny_target_dir: Path, sibling: Path) -> None:
    options = {"extra_special_tokens": ["e"]}
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu", tokenizer_options=options))
    load_drafter(f"draft_model:{sibling}", target)
    build_drafter(parse_drafter({"kind": "draft_model", "path": str(sibling)}), target)
    target.tokenizer_options = {}
    with pytest.raises(ValueError, match="has another tokenizer"):
        load_drafter(f"draft_model:{sibling}", target)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_code(folder: Path) -> None:
    config = read_json(folder / "config.json")
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    write_json(folder / "config.json", {**config, "model_type": "unheard_of", "auto_map": auto_map})


def quantised(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})


def without_a_tensor(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_weights, "has no weights in safetensors, and others, such as pickles, can run code.*convert it"),
        (with_code, "code that comes with a draft model isn't run"),
        (quantised, "is quantised, which isn't supported; give the model with plain weights"),
        (without_a_tensor, "lack .* tensors .* complete the download"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; give a model of transformers"),
        (lambda folder: write_json(folder / "config.json", {"kind": "medusa"}), "no model_type.*name it without draft_model:"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not a JSON file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_a_folder_that_cannot_draft_is_an_error_with_a_remedy(target, changed, change, message):
    change(changed)
    with pytest.raises(ValueError, match=message):
        load_drafter(f"draft_model:{changed}", target)
    assert not (changed / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("draft_model:", "names no model; give draft_model:DIR"),
        ("suffix+draft_model:", "names no model"),
        ("draft_model:nowhere", "nowhere is neither a folder nor a name on the Hub"),
        ("FOLDER", "holds a model of transformers .llama., not a drafter.*name it draft_model:DIR"),
        ("draft_model:FOLDER+draft_model:FOLDER", "twice; give each part once"),
    ],
)
def test_a_wrong_name_is_an_error(sibling, name, message):
    with pytest.raises(ValueError, match=message):
        parse_drafter_name(name.replace("FOLDER", str(sibling)))


def test_a_name_on_the_hub_downloads_no_code(sibling, monkeypatch):
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(sibling)

    monkeypatch.setattr("outrider.models.drafters.saved.download.snapshot_download", download)
    parts = parse_drafter_name("draft_model:user/small@v2")
    assert isinstance(parts, DrafterParts)
    assert (asked["repo"], asked["revision"]) == ("user/small", "v2")
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["allow_patterns"])
