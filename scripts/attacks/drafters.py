"""Attacks by a stranger's drafter: its configuration, its weights, or a model that drafts as it is."""

import json
import shutil
import struct
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from .cases import RIGHT, WRONG, Case, Finding
from .lab import TARGET, in_child

KIND = "drafters"
OPTIONS: dict[str, dict[str, Any]] = {
    "redrafter": {"exit_width": 16, "num_blocks": 1, "beam_width": 2, "beam_length": 3},
    "medusa": {"heads": "ffn", "share_head": True, "tree_nodes": 8},
    "eagle": {"depth": 3, "tree_nodes": 8},
    "eagle3": {"feature_layers": [2, 4, 7], "depth": 3, "tree_nodes": 8},
    "draft_model": {"init": "target_layers", "length": 3, "top_k": 2, "tree_nodes": 8},
}
HUGE, ENDLESS = 10**6, 10**12
CHANGES: dict[str, list[tuple[str, Any]]] = {
    "redrafter": [
        ("drafter.exit_width", HUGE), ("drafter.exit_width", ENDLESS), ("drafter.exit_width", -1), ("drafter.exit_width", 16.5),
        ("drafter.num_blocks", HUGE), ("drafter.num_blocks", ENDLESS), ("drafter.beam_width", ENDLESS),
        ("drafter.beam_length", HUGE), ("drafter.initial_state", "nothing"), ("drafter.tree_nodes", HUGE),
        ("drafter.pace", ["fixed"]), ("drafter", []), ("drafter", None), ("kind", "../redrafter"), ("kind", ["redrafter"]),
        ("kind", "medusa"), ("format_version", 10**30), ("format_version", None), ("target", None),
        ("target.vocab_size", ENDLESS), ("target.hidden_size", 0), ("target.hidden_size", "64"),
    ],
    "medusa": [
        ("drafter.num_heads", HUGE), ("drafter.num_heads", ENDLESS), ("drafter.num_heads", 0), ("drafter.heads", "exec"),
        ("drafter.tree_nodes", ENDLESS), ("drafter.tree_paths", [[10**9] * 4]), ("drafter.tree_paths", [[0] * HUGE]),
    ],
    "eagle": [("drafter.depth", HUGE), ("drafter.top_k", ENDLESS), ("drafter.tree_nodes", HUGE), ("drafter.layer", ENDLESS)],
    "eagle3": [
        ("drafter.feature_layers", [0] * HUGE), ("drafter.feature_layers", [10**9]), ("drafter.depth", ENDLESS),
        ("drafter.draft_vocab_size", ENDLESS),
    ],
    "draft_model": [
        ("drafter.architecture.num_hidden_layers", HUGE), ("drafter.architecture.num_hidden_layers", ENDLESS),
        ("drafter.architecture.hidden_size", ENDLESS), ("drafter.architecture.vocab_size", ENDLESS),
        ("drafter.architecture.intermediate_size", -1), ("drafter.architecture.model_type", "../evil"),
        ("drafter.architecture.num_attention_heads", 0), ("drafter.length", HUGE),
    ],
}  # fmt: skip
"""Keys of a saved drafter's config.json, by its kind, and their hostile values."""
SMALL_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_positions": 128}
MODELS: dict[str, dict[str, Any]] = {
    "a million layers": {"num_hidden_layers": HUGE},
    "a million layers, named as GPT-2's": {**SMALL_GPT2, "n_layer": HUGE},
    "a million layers, named as Bart's": {"model_type": "bart", "d_model": 32, "decoder_layers": HUGE},
    "layers of a text model inside": {"model_type": "gemma3", "text_config": {"num_hidden_layers": HUGE}},
    "a width of 10^12": {"hidden_size": ENDLESS},
    "no heads": {"num_attention_heads": 0},
    "heads of a text": {"num_attention_heads": "four"},
    "an unknown type": {"model_type": "no_such_model"},
    "code of its own": {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}},
    "a vocabulary of 10^12": {"vocab_size": ENDLESS},
    "unknown rotary frequencies": {"rope_parameters": {"rope_type": "evil", "rope_theta": 0}},
    "quantised by an unknown method": {"quantization_config": {"quant_method": "evil"}},
}
"""Changes of the configuration of a model that drafts as it is."""
HEADER_BYTES = 8


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each hostile value, damage of the weights, and model."""
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        in_child(partial(save_drafters, folder), folder)
        (folder / "made").touch()
    cases = []
    for kind, changes in CHANGES.items():
        for key, value in changes:
            attack = partial(load_and_decode, folder / kind, partial(set_key, key=key, value=value))
            cases.append(Case(kind=KIND, name=f"{kind}: {key} = {str(value)[:30]}", attack=attack))
    for name, damage in FILES.items():
        cases.append(Case(kind=KIND, name=name, attack=partial(load_and_decode, folder / "redrafter", damage)))
    for name, values in MODELS.items():
        attack = partial(load_and_decode, TARGET, partial(change_model, values=values), prefix="draft_model:")
        cases.append(Case(kind=KIND, name=f"a model that drafts: {name}", attack=attack))
    return cases


def save_drafters(folder: Path) -> None:
    """Save a fresh drafter of each kind."""
    from outrider.models.drafters import build_drafter, save_drafter
    from outrider.models.drafters.saved.build import DrafterSpec

    target, _, _ = decoder()
    for kind, options in OPTIONS.items():
        drafter = build_drafter(DrafterSpec.of(kind, options), target)
        save_drafter(drafter, folder / kind, target.identity)


@lru_cache
def decoder() -> Any:
    """Return the demo's target, a prompt, and a function that decodes it with a drafter."""
    import torch

    from outrider.models.decoding import GreedyAcceptance, generate
    from outrider.models.llm.loading import load_target

    target = load_target(str(TARGET), torch.device("cpu"))
    prompt = target.tokenizer("def add(a, b):\n    return", return_tensors="pt").input_ids

    def decode(drafter: Any) -> list[int]:
        steps = generate(target, drafter, GreedyAcceptance(), prompt, max_new_tokens=16)
        return [token for step in steps for tokens in step.tokens for token in tokens]

    return target, prompt, decode


def load_and_decode(source: Path, damage: Any, place: Path, prefix: str = "") -> Finding:
    """Load a damaged copy of a drafter, and decode with it: the text must be plain decoding's."""
    from outrider.models.drafters import NullDrafter
    from outrider.models.drafters.saved.loading import load_drafter

    copy = place / "drafter"
    shutil.copytree(source, copy)
    damage(copy)
    target, _, decode = decoder()
    drafted = decode(load_drafter(f"{prefix}{copy}", target))
    return Finding(RIGHT) if drafted == decode(NullDrafter()) else Finding(WRONG, f"{drafted}")


def set_key(copy: Path, *, key: str, value: Any) -> None:
    """Set a key of config.json, given as a dotted path."""
    path = copy / "config.json"
    config = json.loads(path.read_text())
    *outer, last = key.split(".")
    holder = config
    for name in outer:
        holder = holder.setdefault(name, {}) or {}
    holder[last] = value
    path.write_text(json.dumps(config))


def change_model(copy: Path, *, values: dict[str, Any]) -> None:
    """Change the configuration of a model of transformers."""
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def nest(copy: Path) -> None:
    """Nest the configuration deeper than any parser's stack."""
    (copy / "config.json").write_text("[" * 200_000 + "]" * 200_000)


def change_header(copy: Path, change: Any) -> None:
    """Change the JSON header of the weights."""
    path = copy / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:HEADER_BYTES])
    header = json.loads(content[HEADER_BYTES : HEADER_BYTES + length])
    text = json.dumps(change(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[HEADER_BYTES + length :])


def change_first_tensor(header: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Change the entry of a header's first tensor."""
    name = next(name for name in header if name != "__metadata__")
    return {**header, name: {**header[name], **values}}


def write_weights(copy: Path, content: bytes) -> None:
    """Replace the weights by other bytes."""
    (copy / "model.safetensors").write_bytes(content)


def fill_weights(copy: Path, value: float) -> None:
    """Fill the weights with one number."""
    from safetensors.torch import load_file, save_file

    path = copy / "model.safetensors"
    save_file({name: tensor.fill_(value) for name, tensor in load_file(path).items()}, path)


def rename_tensor(header: dict[str, Any]) -> dict[str, Any]:
    """Give the first tensor another name."""
    name, *_ = (name for name in header if name != "__metadata__")
    return {f"other.{key}" if key == name else key: value for key, value in header.items()}


FILES: dict[str, Any] = {
    "config.json nested without end": nest,
    "config.json of a list": lambda copy: (copy / "config.json").write_text("[]"),
    "config.json of bytes": lambda copy: (copy / "config.json").write_bytes(b"\xff\xfe\x00"),
    "weights with a header of 2^60 bytes": lambda copy: write_weights(copy, struct.pack("<Q", 1 << 60) + b"{}"),
    "weights of a pickle": lambda copy: write_weights(copy, b"\x80\x04\x95cos\nsystem\n(S'touch stolen'\ntR."),
    "weights of no bytes": lambda copy: write_weights(copy, b""),
    "weights that overlap": lambda copy: change_header(copy, lambda header: change_first_tensor(header, data_offsets=[0, 64])),
    "weights of an unknown type": lambda copy: change_header(copy, lambda header: change_first_tensor(header, dtype="X99")),
    "weights of a negative shape": lambda copy: change_header(copy, lambda header: change_first_tensor(header, shape=[-1])),
    "weights of another name": lambda copy: change_header(copy, rename_tensor),
    "weights of NaN": lambda copy: fill_weights(copy, float("nan")),
    "weights of 1e38": lambda copy: fill_weights(copy, 1e38),
}
"""Damages of a drafter's files."""
