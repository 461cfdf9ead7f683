"""Every format: an export imports bit for bit, drafts the same, and wrong files are errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import load_drafter, save_drafter
from outrider.models.drafters.objective import Loss
from outrider.models.export import config
from outrider.models.export.registry import ENGINES, FORMATS, export_drafter, format_for, format_of, formats_for, import_drafter

DSPARK: dict[str, Any] = {
    "correction": "markov",
    "rank": 4,
    "inject": False,
    "mask_token_id": 5,
    "layer": {"model_type": "qwen3"},
    "init": "random",
}
CASES: dict[str, list[dict[str, Any]]] = {
    "dspark": [{**DSPARK, "num_layers": 2, "block": 3}, {**DSPARK, "feature_layers": [0, 4], "width": 2}],
    "speculators-dspark": [{**DSPARK, "draft_vocab_size": 40}, {**DSPARK, "num_layers": 2}],
    "eagle1-vllm": [{"bias": False, "depth": 3, "feature_noise": 0.2}],
    "eagle1-sglang": [{"bias": True, "top_k": 3}, {"bias": False, "depth": 2}],
    "eagle3": [
        {"draft_vocab_size": 40},
        {"fc_norm": True, "norm_output": True},
        {"draft_vocab_size": 300, "depth": 2, "norm_before_fc": True},
        {},
    ],
    "speculators": [{"draft_vocab_size": 40}, {"feature_layers": [1, 3, 6], "fc_norm": True, "norm_output": True}],
    "apple": [{"initial_state": "zero", "exit_width": 24, "beam_width": 3}, {"initial_state": "zero", "num_blocks": 0}],
    "medusa": [{"num_heads": 3}, {"num_heads": 2, "share_head": True, "tree_paths": [[0], [1]]}],
    "tensorrt-llm": [{"num_heads": 2, "num_layers": 2, "tree_nodes": 9}],
    "transformers": [{"hidden_size": 16, "length": 3}, {"init": "target_layers", "top_k": 2}],
}
ALL_CASES = [
    pytest.param(name, options, marks=pytest.mark.slow if index else [])
    for name, cases in CASES.items()
    for index, options in enumerate(cases)
]
PROMPTS = [[1, 70, 71, 72, 2], [9], [40, 41, 42, 43, 44, 45, 46, 47]]


def trees(target: Any, drafter: Any) -> list[tuple[Any, Any]]:
    """List the draft trees of a few answers."""
    drafted_trees = []

    class Watched:
        def __getattr__(self, name):
            return getattr(drafter, name)

        def propose(self, state, last_token, *, generator=None):
            tree, drafted = drafter.propose(state, last_token)
            drafted_trees.append((tree.tokens.tolist(), tree.parents.tolist()))
            return tree, drafted

    rows = [torch.tensor(prompt) for prompt in PROMPTS]
    for _ in generate(target, Watched(), GreedyAcceptance(), rows, max_new_tokens=6, stop_ids=()):
        pass
    return drafted_trees


def test_every_format_has_a_case_and_a_page():
    assert CASES.keys() == FORMATS.keys() - {"mtp"}, "for that one see `test_mtp`"
    pages = Path(__file__).parents[3] / "docs" / "how-to" / "engines"
    written = {name for page in pages.glob("*.md") for name in re.findall(r"--to ([\w-]+)", page.read_text())}
    assert written == FORMATS.keys() | {"gguf"}
    linked = re.findall(r"\]\((\w+\.md)\)", (pages / "README.md").read_text())
    assert {*linked, "README.md"} == {page.name for page in pages.iterdir()}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("name", "options"), ALL_CASES)
def test_an_export_imports_bit_for_bit_and_drafts_the_same(name, options, llama, make_drafter, tmp_path):
    drafter = make_drafter(FORMATS[name].kind, llama, **options)
    save_drafter(drafter, tmp_path / "ours", llama.identity)
    export_drafter(tmp_path / "ours", llama, name, tmp_path / "theirs")
    assert format_of(tmp_path / "theirs").name == name
    save_drafter(import_drafter(tmp_path / "theirs", llama), tmp_path / "again", llama.identity)
    before, after = (
        {path.name: path.read_bytes() for path in (tmp_path / name_of_folder).iterdir()} for name_of_folder in ("ours", "again")
    )
    assert before == after
    first, second = (trees(llama, load_drafter(tmp_path / name_of_folder, llama)) for name_of_folder in ("ours", "again"))
    assert len(first) > 3
    assert first == second


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("name", "options"), [(name, cases[0]) for name, cases in CASES.items()])
def test_an_import_without_outrider_json_drafts_the_same(name, options, llama, make_drafter, tmp_path):
    """Published drafters have no outrider.json, so their default settings are unknown."""
    drafter = make_drafter(FORMATS[name].kind, llama, **options)
    save_drafter(drafter, tmp_path / "ours", llama.identity)
    export_drafter(tmp_path / "ours", llama, name, tmp_path / "theirs", torch.float32)
    (tmp_path / "theirs" / "outrider.json").unlink()
    assert format_of(tmp_path / "theirs").kind == FORMATS[name].kind
    settings = {key: getattr(drafter.config, key) for key in type(drafter.config).RUNTIME_FIELDS}
    again = import_drafter(tmp_path / "theirs", llama, options=settings)
    if name in ("medusa", "tensorrt-llm"):
        again.calibrate(measured_as(drafter.accuracies))
    save_drafter(again, tmp_path / "again", llama.identity)
    again = load_drafter(tmp_path / "again", llama)
    assert {key: getattr(again.config, key) for key in settings} == settings
    if name != "eagle1-sglang":  # this format has a bias of zeros
        assert again.state_dict().keys() >= drafter.state_dict().keys() - {"draft_tokens"}
    assert trees(llama, again) == trees(llama, load_drafter(tmp_path / "ours", llama))


def measured_as(accuracies: torch.Tensor) -> Any:
    counts = torch.full((len(accuracies),), 10**9)
    hits = (accuracies.double().cumsum(1) * counts[:, None]).round().long()
    return Loss(sums=torch.zeros(len(accuracies)), counts=counts, hits=hits, joint_hits=hits[:, 0])


@pytest.mark.parametrize("name", CASES)
def test_stray_missing_and_misshapen_tensors_are_named(name, llama, make_drafter, tmp_path):
    path = exported(name, llama, make_drafter, tmp_path)
    file = next(file for file in path.iterdir() if file.suffix in (".safetensors", ".pt"))
    original = safetensors.torch.load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    key = next(
        tensor_name for tensor_name in sorted(original) if original[tensor_name].ndim == 2 and "embed" not in tensor_name
    )

    def write(tensors):
        safetensors.torch.save_file(tensors, file) if file.suffix == ".safetensors" else torch.save(tensors, file)

    changes = {
        f"missing {key}|match no known format": {
            tensor_name: value for tensor_name, value in original.items() if tensor_name != key
        },
        "unknown stray": {**original, "stray": torch.ones(1)},
        rf"{key} is \(\d+, \d+\), not \(\d+, \d+\)": {**original, key: torch.ones(3, 5)},
        f"{key} is of torch.int": {**original, key: original[key].int()},
        f"{key} holds numbers that aren't finite": {**original, key: original[key] * torch.inf},
    }
    for message, tensors in changes.items():
        write(tensors)
        with pytest.raises(ValueError, match=message):
            import_drafter(path, llama, name=name)
    write(original)
    import_drafter(path, llama)


def exported(name: str, target: Any, make_drafter: Any, tmp_path: Path) -> Path:
    drafter = make_drafter(FORMATS[name].kind, target, **CASES[name][0])
    save_drafter(drafter, tmp_path / "ours", target.identity)
    export_drafter(tmp_path / "ours", target, name, tmp_path / "theirs")
    return tmp_path / "theirs"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"transformers"}))
def test_unknown_keys_are_errors(name, llama, make_drafter, tmp_path):
    path = exported(name, llama, make_drafter, tmp_path)
    edit(path / "config.json", surprise=1)
    with pytest.raises(ValueError, match="surprise: there is no such key"):
        import_drafter(path, llama)


@pytest.mark.parametrize("name", ["eagle3", "transformers"])
def test_a_former_option_with_todays_value_is_left_out_of_an_outrider_json(name, llama, make_drafter, tmp_path):
    path = exported(name, llama, make_drafter, tmp_path)
    note = json.loads((path / "outrider.json").read_text())
    edit(path / "outrider.json", drafter={**note["drafter"], "temperature": 0.0})
    assert not hasattr(import_drafter(path, llama).config, "temperature")


@pytest.mark.parametrize("name", ["apple", "medusa"])
def test_an_outrider_json_of_another_drafter_or_target_is_an_error(name, llama, make_drafter, tmp_path):
    path = exported(name, llama, make_drafter, tmp_path)
    note = json.loads((path / "outrider.json").read_text())
    for changes, message in (
        ({"target": {**note["target"], "tokenizer_sha256": "1" * 64}}, "tokenizer_sha256: 1111"),
        ({"kind": "nothing"}, "has the kind nothing"),
        ({"surprise": 1}, "surprise"),
        ({"drafter": {**note["drafter"], "start_from": "/etc"}}, "no option start_from"),
        ({"format_version": 2}, "has version 2"),
    ):
        (path / "outrider.json").write_text(json.dumps(note | changes))
        with pytest.raises(ValueError, match=message):
            import_drafter(path, llama)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({"accuracies": [[float("nan")] * 10] * 3}, "accuracies must be shares of all labels"),
        ({"accuracies": [[0.5], [0.5, 0.5]]}, r"outrider.json doesn't match the weights"),
        ({"accuracies": [[0.5]]}, r"outrider.json doesn't match the weights"),
        ({"speed": [[1.0]]}, "has unknown measurements, speed"),
    ],
)
def test_measurements_that_contradict_the_drafter_are_an_error(measured, message, llama, make_drafter, tmp_path):
    path = exported("medusa", llama, make_drafter, tmp_path)
    edit(path / "outrider.json", measured=measured)
    with pytest.raises(ValueError, match=message):
        import_drafter(path, llama)


def test_an_interrupted_export_keeps_the_earlier_one_and_a_killed_one_leaves_nothing(
    llama, make_drafter, tmp_path, monkeypatch
):
    """The configuration of one drafter must not end up with the weights of another."""
    path = exported("eagle3", llama, make_drafter, tmp_path)
    (path / "README.md").write_text("the user's")
    (path / ".config.json.77.outrider-tmp").write_text("of a killed process")
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".outrider-tmp"}
    save_drafter(make_drafter("eagle3", llama, draft_vocab_size=8), tmp_path / "ours", llama.identity)

    def killed(path: Path, content: bytes) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("outrider.models.export.formats.atomic_write_bytes", killed)
        with pytest.raises(OSError, match="no space left"):
            export_drafter(tmp_path / "ours", llama, "eagle3", path)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name in before} == before
    export_drafter(tmp_path / "ours", llama, "eagle3", path)
    assert {file.name for file in path.iterdir()} == {*before}
    assert (path / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert import_drafter(path, llama).config.draft_vocab_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "mtp"}, "speculators_config.algorithm 'mtp'"),
        ({"surprise": 1}, "speculators_config.surprise: there is no such key"),
        ({"proposal_methods": [3]}, r"speculators_config.proposal_methods\[0\]=3: "),
        ({"proposal_methods": "x"}, "speculators_config.proposal_methods=.x.: must be a list"),
    ],
)
def test_the_speculators_config_is_read_strictly(changes, message, llama, make_drafter, tmp_path):
    path = exported("speculators", llama, make_drafter, tmp_path)
    config = json.loads((path / "config.json").read_text())
    edit(path / "config.json", speculators_config={**config["speculators_config"], **changes})
    with pytest.raises(ValueError, match=message):
        import_drafter(path, llama)


def test_outrider_json_overrides_the_configuration(llama, make_drafter, tmp_path):
    path = exported("eagle3", llama, make_drafter, tmp_path)
    edit(path / "config.json", rope_theta=123.0)
    assert import_drafter(path, llama).config.layer is None
    (path / "outrider.json").unlink()
    again = import_drafter(path, llama)
    assert again.config.layer["rope_parameters"]["rope_theta"] == 123.0


def test_an_export_overwrites_only_an_export_of_the_same_format(llama, make_drafter, tmp_path):
    path = exported("eagle3", llama, make_drafter, tmp_path)
    export_drafter(tmp_path / "ours", llama, "eagle3", path)
    messages = {path: "one format; write speculators into a folder of its own", tmp_path / "ours": "holds other files already"}
    for folder, message in messages.items():
        before = {path_of_file.name: path_of_file.read_bytes() for path_of_file in folder.iterdir()}
        with pytest.raises(ValueError, match=message):
            export_drafter(tmp_path / "ours", llama, "speculators", folder)
        assert {path_of_file.name: path_of_file.read_bytes() for path_of_file in folder.iterdir()} == before


def test_an_export_in_bfloat16_keeps_its_type_when_imported(llama, make_drafter, tmp_path):
    save_drafter(make_drafter("eagle3", llama, draft_vocab_size=40), tmp_path / "ours", llama.identity)
    export_drafter(tmp_path / "ours", llama, "eagle3", tmp_path / "theirs", torch.bfloat16)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    save_drafter(import_drafter(tmp_path / "theirs", llama), tmp_path / "again", llama.identity)
    again = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert {tensor.dtype for name, tensor in again.items() if name != "draft_tokens"} == {torch.bfloat16}
    theirs = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    assert torch.equal(theirs["midlayer.mlp.up_proj.weight"], again["layer.mlp.up_proj.weight"])
    assert theirs["d2t"].dtype == torch.int64
    export_drafter(tmp_path / "again", llama, "eagle3", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (tmp_path / "theirs" / "model.safetensors").read_bytes()


def test_an_unknown_format_and_a_folder_of_no_format_are_errors(llama, make_drafter, tmp_path):
    path = exported("apple", llama, make_drafter, tmp_path)
    with pytest.raises(
        ValueError,
        match=r"the format is 'gguf'; choose one of .*: speculators-dspark \(block\), speculators \(eagle3\), eagle3",
    ):
        import_drafter(path, llama, name="gguf")
    (path / "outrider.json").unlink()
    (path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="which match no known format; give its format"):
        format_of(path)


def test_an_engine_stands_for_the_format_of_the_drafters_kind() -> None:
    assert formats_for(["vllm", "sglang", "eagle3", "apple"], "eagle3", None) == ["eagle3"]
    assert formats_for(["vllm", "sglang"], "eagle3", [1, 2, 3]) == ["speculators", "eagle3"]
    assert formats_for(["vllm"], "eagle3", [2, 15, 27]) == ["eagle3"], "the usual layers of 30, written out"
    assert formats_for(["vllm"], "eagle3", [2, 14, 27]) == ["speculators"]
    assert formats_for(["vllm", "sglang"], "eagle", None) == ["eagle1-vllm", "eagle1-sglang"]
    assert formats_for(["vllm", "apple"], "redrafter", None) == ["apple"]
    assert not format_for("vllm", "redrafter")


def test_a_recipe_knows_the_formats_without_loading_torch() -> None:
    assert (set(config.FORMATS), set(config.ENGINES)) == (FORMATS.keys(), ENGINES.keys())
