"""Apple's directory format, against an independent version of its forward pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.export.apple import FORMAT
from outrider.models.export.formats import read_folder, write_folder

HIDDEN, VOCAB = 32, 300
CASES = [
    {"num_blocks": 2},
    {"num_blocks": 0},
    {"num_blocks": 1, "exit_width": 24},
]

# Parameters of `Drafter` in Apple's code for MLX (recurrent_drafting/mlx/modeling_drafter.py of
# github.com/apple/ml-recurrent-drafter, commit bd8586b), by the condition under which they exist.
# `load_model` reads the keys of `ModelArgs`, and `load_weights` requires exactly these names.
MLX_KEYS = {"hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "model_type", "rnn"}


def mlx_names(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, exit_dim, layers = config["hidden_size"], config["exit_dim"], config["num_draft_layers"]
    names: dict[str, tuple[int, ...]] = {f"lm_head.{layers}.weight": (config["vocab_size"], exit_dim)}
    for layer in range(layers):
        names |= {f"lm_head.{layer}.linear.weight": (exit_dim, exit_dim), f"lm_head.{layer}.linear.bias": (exit_dim,)}
    if exit_dim != 2 * hidden:
        names |= {"input_proj.weight": (exit_dim, 2 * hidden), "input_proj.bias": (exit_dim,)}
    if config["rnn"]:
        names |= {"rnn_u.weight": (hidden, hidden), "rnn_u.bias": (hidden,), "rnn_w.weight": (hidden, hidden)}
    return names


def from_apple(directory, target, **options):
    return read_folder(FORMAT, directory, target, options)


def make(target, **options):
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "redrafter", "initial_state": "zero", **options}), target)
    # The blocks start as the identity, which would hide mistakes in them.
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def their_folder(directory: Path, *, layers: int, exit_dim: int) -> Path:
    """Write a folder as Apple's release saves one, with random weights."""
    config = {"hidden_size": HIDDEN, "exit_dim": exit_dim, "num_draft_layers": layers, "rnn": True, "vocab_size": VOCAB}
    generator = torch.Generator().manual_seed(1)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in mlx_names(config).items()}
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    general = {"model_type": "recurrent_drafting_drafter", "architectures": ["Drafter"], "num_lookback_tokens": -1}
    (directory / "config.json").write_text(json.dumps(config | general | {"torch_dtype": "float32"}))
    return directory


def their_logits(directory: Path, embeddings: list[torch.Tensor], context: torch.Tensor) -> torch.Tensor:
    """Compute Apple's logits after these embeddings, from the folder's files alone."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {name: value.double() for name, value in safetensors.torch.load_file(directory / "model.safetensors").items()}
    state = torch.zeros(HIDDEN, dtype=torch.float64)
    for embedding in embeddings:
        from_state = tensors["rnn_u.weight"] @ state + tensors["rnn_u.bias"]
        state = F.silu(tensors["rnn_w.weight"] @ embedding + from_state)
    x = torch.cat([context, state])
    if config["exit_dim"] != 2 * config["hidden_size"]:
        x = tensors["input_proj.weight"] @ x + tensors["input_proj.bias"]
    layers = config["num_draft_layers"]
    for layer in range(layers):
        x = x + F.silu(tensors[f"lm_head.{layer}.linear.weight"] @ x + tensors[f"lm_head.{layer}.linear.bias"])
    return tensors[f"lm_head.{layers}.weight"] @ x


def our_logits(drafter, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    embeddings = drafter.embed(tokens)
    state = drafter.first_state(embeddings[0])
    for embedding in embeddings[1:]:
        state = drafter.next_state(state, embedding)
    return drafter.logits(context, state)


def assert_same_logits(drafter, directory: Path) -> None:
    context = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens = torch.tensor([7, 8, 9, 10])
    with torch.no_grad():
        for length in range(1, 5):
            expected = their_logits(directory, list(drafter.embed(tokens[:length])), context)
            assert expected.std() > 0.1
            assert torch.allclose(our_logits(drafter, tokens[:length], context), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", CASES)
def test_an_export_has_equal_logits_and_the_names_shapes_and_keys_that_the_mlx_loader_requires(target, tmp_path, options):
    drafter = make(target, **options)
    write_folder(FORMAT, drafter, tmp_path / "theirs", target)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    tensors = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    assert config.keys() >= MLX_KEYS, "an absent rnn would be false there"
    assert "emb_norm" not in config
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == mlx_names(config)
    assert_same_logits(drafter.double(), tmp_path / "theirs")


@pytest.mark.parametrize(("layers", "exit_dim"), [(2, 64), (1, 24), (0, 64)])
def test_an_apple_import_has_equal_logits_and_exports_bit_for_bit(target, tmp_path, layers, exit_dim):
    theirs = their_folder(tmp_path / "theirs", layers=layers, exit_dim=exit_dim)
    drafter = from_apple(theirs, target)
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    save_drafter(drafter, tmp_path / "ours", target.identity)
    loaded = load_drafter(tmp_path / "ours", target)
    assert_same_logits(loaded, theirs)
    write_folder(FORMAT, loaded, tmp_path / "again", target)
    before, after = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value.double(), after[name]) for name, value in before.items())
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config.pop("torch_dtype") == "float64", "the target's, in which the drafter was loaded"
    assert config.items() <= json.loads((theirs / "config.json").read_text()).items()


def test_a_drafter_that_apples_format_cannot_hold_is_an_error(target, tmp_path):
    with pytest.raises(ValueError, match="it drafts 40 tokens only"):
        write_folder(FORMAT, make(target, draft_vocab_size=40), tmp_path / "theirs", target)
    with pytest.raises(ValueError, match="a drafter of the kind medusa can't be written as apple"):
        write_folder(FORMAT, build_drafter(parse_drafter({"kind": "medusa"}), target), tmp_path / "theirs", target)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": "4"}, 'beam_width="4": must be a whole number'),
        ({"bogus": 1}, "no option bogus"),
        ({"num_blocks": 1}, "num_blocks can't be changed when a redrafter is loaded"),
    ],
)
def test_import_options_are_checked_as_for_saved_drafters(target, tmp_path, options, message):
    theirs = their_folder(tmp_path / "theirs", layers=1, exit_dim=64)
    with pytest.raises(ValueError, match=message):
        from_apple(theirs, target, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("exit_dim"), "exit_dim: is missing"),
        (lambda config: config.update(rnn=False), "rnn=false: must be True"),
        (lambda config: config.update(model_type="llama"), "model_type=.llama.: must be one of"),
        (lambda config: config.update(hidden_size=64), "hidden_size is 64, the target's 32"),
        (lambda config: config.update(exit_dim=48), r"missing input_proj.bias; missing input_proj.weight"),
        (lambda config: config.update(exit_dim=10**12), "exit_dim=1000000000000: must be below"),
        (lambda config: config.update(num_draft_layers=1), r"missing lm_head.1.weight"),
        (lambda config: config.update(num_draft_layers=3_000_000), "a model of more than .* modules and parameters"),
        (lambda config: config.update(num_draft_layers=-1), "num_draft_layers=-1: must be at least 0"),
    ],
)
def test_a_configuration_that_contradicts_weights_or_target_is_an_error(target, tmp_path, change, message):
    theirs = their_folder(tmp_path / "theirs", layers=2, exit_dim=64)
    config = json.loads((theirs / "config.json").read_text())
    change(config)
    (theirs / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        from_apple(theirs, target)
