"""Grown targets generate the original's text, and wrong inputs leave no folder that loads."""

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

SCRIPT = Path(__file__).parents[2] / "scripts" / "grow_target.py"
DRAFTERS = {
    "redrafter": {"kind": "redrafter", "exit_width": 32, "head_init": "target", "beam_width": 4, "beam_length": 3},
    "medusa": {"kind": "medusa", "tree_nodes": 8},
    "eagle": {"kind": "eagle", "depth": 3, "top_k": 2, "tree_nodes": 6},
    "eagle3": {"kind": "eagle3", "depth": 3, "top_k": 2, "tree_nodes": 6},
    "draft_model": {"kind": "draft_model", "init": "target_layers", "num_layers": 1, "length": 3},
}
GROWN_EAGLES = ("eagle", "eagle3")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("grow_target")


@pytest.fixture
def grow(script: Any) -> Callable[..., None]:
    """Return the command."""
    app = typer.Typer()
    app.command()(script.main)
    command = typer.main.get_command(app)
    return lambda *arguments: command.main([str(argument) for argument in arguments], standalone_mode=False)


def load(folder: Path, dtype: str = "float32") -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(folder), dtype=dtype, device="cpu"))


def steps(target: HFTarget, drafter: Any, num_tokens: int = 24) -> list[Any]:
    prompts = [torch.arange(5, 17), torch.arange(40, 60)]
    return [step.tokens for step in generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=num_tokens)]


def test_the_stages_of_the_demo_have_the_layers_of_its_grown_target(script: Any, demo_target_dir: Path) -> None:
    stages = yaml.safe_load((Path(__file__).parents[2] / "conf" / "target" / "demo_stages.yaml").read_text())["stage_layers"]
    assert sum(stages) == script.Source.of(demo_target_dir).choose_size(200_000_000).layers


@pytest.mark.parametrize("sizes", [("--layers", 5), ("--intermediate", 129), ("--layers", 3, "--intermediate", 320), ()])
def test_a_grown_target_has_its_sizes_and_the_same_text(grow, tiny_target_dir, tmp_path, sizes):
    grow(tmp_path / "grown", "--target", tiny_target_dir, *sizes)
    old, new = load(tiny_target_dir), load(tmp_path / "grown")
    given = dict(zip(sizes[::2], sizes[1::2], strict=True))
    config = new.model.config
    assert (config.num_hidden_layers, config.intermediate_size) == (given.get("--layers", 2), given.get("--intermediate", 64))
    assert steps(new, NullDrafter()) == steps(old, NullDrafter())
    record = json.loads((tmp_path / "grown" / "grown.json").read_text())
    assert record["parameters"] == new.model.num_parameters()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters_of_the_original_load_and_accept_as_much(grow, tiny_target_dir, tmp_path, kind):
    """EAGLE's layer takes its sizes from the target, and EAGLE-3 also the layers that it reads."""
    old = load(tiny_target_dir)
    torch.manual_seed(0)
    folder = tmp_path / kind / "drafter"
    save_drafter(build_drafter(parse_drafter(DRAFTERS[kind]), old), folder, old.identity)
    grow(tmp_path / "grown", "--target", tiny_target_dir, "--layers", 6, "--intermediate", 192, "--drafters", folder)
    new = load(tmp_path / "grown")
    copied = tmp_path / "grown" / "drafters" / kind
    assert steps(new, load_drafter(copied, new)) == steps(old, load_drafter(folder, old))
    load_drafter(f"{copied}+suffix", new)
    if kind in GROWN_EAGLES:
        with pytest.raises(ValueError, match="mlp"):
            load_drafter(folder, new)
    else:
        assert steps(new, load_drafter(folder, new)) == steps(old, load_drafter(folder, old))


def test_the_demos_target_keeps_its_text(grow: Callable[..., None], demo_target_dir: Path, tmp_path: Path) -> None:
    grow(tmp_path / "grown", "--target", demo_target_dir, "--layers", 10, "--intermediate", 1024)
    old, new = load(demo_target_dir), load(tmp_path / "grown")
    assert steps(new, NullDrafter()) == steps(old, NullDrafter())
    assert AutoConfig.from_pretrained(tmp_path / "grown").dtype == torch.bfloat16
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "grown" / name).read_bytes() == (demo_target_dir / name).read_bytes()


def test_new_weights_are_random_and_what_they_add_is_zero(grow, tiny_target_dir, tmp_path):
    for name in "ab":
        arguments = ("--layers", 3, "--intermediate", 256, "--dtype", "bfloat16")
        grow(tmp_path / name, "--target", tiny_target_dir, *arguments)
    tensors, same = (
        {key: value for path in sorted((tmp_path / name).glob("*.safetensors")) for key, value in load_file(path).items()}
        for name in "ab"
    )
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert all(torch.equal(tensor, same[name]) for name, tensor in tensors.items())
    assert not tensors["model.layers.0.mlp.down_proj.weight"][:, 64:].any()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert not tensors[f"model.layers.2.{name}.weight"].any()
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate_proj"):
        weight = tensors[f"model.layers.2.{name}.weight"].float()
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert weight.unique(dim=0).shape == weight.shape, "rows must not repeat"
    # Zeros take disk and memory too: no file has holes.
    for path in (tmp_path / "a").glob("*.safetensors"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_parameters_choose_layers_and_neurons(script: Any, demo_target_dir: Path) -> None:
    source = script.Source.of(demo_target_dir)
    sizes = {text: source.choose_size(script.parse_parameters(text)) for text in ("7M", "30M", "100M", "400M", "1.6B", "8B")}
    assert (sizes["7M"].layers, sizes["7M"].intermediate) == (8, 704)
    assert (sizes["400M"].layers, sizes["400M"].intermediate) == (32, 16000)
    assert [size.layers for size in sizes.values()] == sorted(size.layers for size in sizes.values())
    for text, size in sizes.items():
        assert size.parameters == pytest.approx(script.parse_parameters(text), rel=0.02)
        assert size.intermediate % 64 == 0
        assert size.layers <= 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "1K"], "original has 3"),
        (["--parameters", "many"], "'many'"),
        (["--parameters=-5M"], "'-5M'"),
        (["--layers", 1], "layers is 1"),
        (["--layers", -3], "layers is -3"),
        (["--intermediate", 63], "intermediate is 63"),
        (["--parameters", "1M", "--layers", 4], "--parameters"),
        (["--drafters", "none"], "none holds no drafter"),
    ],
)
def test_wrong_sizes_are_refused(grow, tiny_target_dir, tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        grow(tmp_path / "grown", "--target", tiny_target_dir, *arguments)
    assert not (tmp_path / "grown").exists()


def gpt2(folder: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1)).save_pretrained(folder)


def mixtral(folder: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", num_key_value_heads=1, num_local_experts=2, **sizes)
    ).save_pretrained(folder)


def change_config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return write


def in_8_bits(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (gpt2, "gpt2"),
        (mixtral, "mixtral.*down_proj"),
        (change_config(quantization_config={"quant_method": "gptq"}), "quantised"),
        (in_8_bits, "I8"),
        (change_config(intermediate_size=32), "another number of neurons"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{}"), "model.safetensors is damaged"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ],
)
def test_what_cannot_grow_is_refused_by_name(grow, tiny_target_dir, tmp_path, change, words):
    shutil.copytree(tiny_target_dir, tmp_path / "source")
    change(tmp_path / "source")
    with pytest.raises(ValueError, match=words):
        grow(tmp_path / "grown", "--target", tmp_path / "source", "--layers", 4)
    assert not (tmp_path / "grown").exists()


def test_only_a_grown_target_is_overwritten(grow: Callable[..., None], tiny_target_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "grown"
    output.mkdir()
    arguments = (output, "--target", tiny_target_dir, "--layers")
    grow(*arguments, 3)  # an empty folder may be filled
    with pytest.raises(ValueError, match="--overwrite"):
        grow(*arguments, 4)
    grow(*arguments, 4, "--overwrite")
    assert load(output).model.config.num_hidden_layers == 4
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="no grown target"):
        grow(home, "--target", tiny_target_dir, "--overwrite")
    assert (home / "letter.txt").read_text() == "dear"


def test_a_full_disk_is_an_error_before_and_during_writing(grow, script, tiny_target_dir, tmp_path, monkeypatch):
    arguments = (tmp_path / "grown", "--target", tiny_target_dir, "--layers", 5)
    with monkeypatch.context() as patched:
        patched.setattr(script.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(ValueError, match="0.0 GB free"):
            grow(*arguments)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="the disk is full") as caught:
            grow(*arguments)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_that_loads(grow: Callable[..., None], demo_target_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path / "grown", "--target", demo_target_dir, "--parameters", "600M"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".grown.outrider-partial/model-00003*")):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "grown").exists()
    assert not (tmp_path / ".grown.outrider-partial" / "config.json").exists()
    grow(tmp_path / "grown", "--target", demo_target_dir, "--layers", 9)
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]
