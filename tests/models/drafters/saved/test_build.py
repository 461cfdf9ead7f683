"""Training from a saved drafter's weights, for a target that may have changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.options import RedrafterConfig
from outrider.models.drafters.registry import DRAFTERS
from outrider.models.drafters.saved.build import require_memory, starting_weights
from outrider.models.llm.hf_target import HFTarget

OPTIONS: dict[str, dict[str, Any]] = {
    "block": {"block": 2},
    "draft_model": {"num_layers": 1, "init": "target_layers"},
    "eagle": {"depth": 2},
    "eagle3": {"depth": 2, "draft_vocab_size": 16},
    "medusa": {"num_heads": 2},
    "mtp": {"init": "random", "depth": 2},
    "redrafter": {"exit_width": 16, "draft_vocab_size": 16},
}


def save(kind: str, target: HFTarget, folder: Path) -> dict[str, torch.Tensor]:
    """Save a drafter whose weights no fresh one has, and return those weights."""
    torch.manual_seed(1)
    drafter = build_drafter(parse_drafter({"kind": kind, **OPTIONS[kind]}), target)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.rand_like(parameter))
    save_drafter(drafter, folder, target.identity)
    return drafter.state_dict()


def changed(target: HFTarget, **identity: Any) -> HFTarget:
    return HFTarget(target.model, target.tokenizer, replace(target.identity, **identity))


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_every_kind_starts_from_its_weights_for_a_changed_target(target: HFTarget, tmp_path: Path, kind: str) -> None:
    weights = save(kind, target, tmp_path)
    fine_tuned = changed(target, name="fine-tuned", weights_sha256="0" * 64, config_sha256="1" * 64)
    drafter = build_drafter(parse_drafter({"start_from": str(tmp_path)}), fine_tuned)
    assert type(drafter) is DRAFTERS[kind]
    assert drafter.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in drafter.state_dict().items())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in drafter.parameters())


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_a_training_that_memory_cannot_hold_is_an_error_before_anything_is_built(target, monkeypatch, kind):
    spec = parse_drafter({"kind": kind, **OPTIONS[kind]})
    require_memory(spec, target)
    monkeypatch.setattr("outrider.models.drafters.saved.build.free_memory", lambda device: 9)
    with pytest.raises(
        ValueError, match=r"more than [\d,]+ parameters .* has 0.0 GB of free memory; its largest option is drafter"
    ):
        require_memory(spec, target)


def test_the_option_of_an_absurd_size_is_named(target: HFTarget) -> None:
    spec = parse_drafter({"kind": "redrafter", "exit_width": 10**9})
    with pytest.raises(ValueError, match=r"takes more than .* GB .*drafter.exit_width=1000000000: lower it"):
        require_memory(spec, target)


@pytest.mark.parametrize("kind", ["eagle3", "redrafter"])
def test_a_reduced_vocabulary_is_kept_with_the_rows_of_the_head(target: HFTarget, tmp_path: Path, kind: str) -> None:
    save(kind, target, tmp_path)
    drafter: Any = build_drafter(parse_drafter({"start_from": str(tmp_path)}), target)
    assert not drafter.wants_token_counts, "training would choose anew"
    assert drafter.vocabulary.tokens.tolist() == list(range(target.vocab_size - 16, target.vocab_size))


def test_options_of_the_form_may_be_repeated_and_options_of_drafting_changed(target: HFTarget, tmp_path: Path) -> None:
    save("redrafter", target, tmp_path)
    options = {"kind": "redrafter", **OPTIONS["redrafter"], "start_from": str(tmp_path), "beam_width": 7}
    spec = parse_drafter(options)
    assert (spec.kind, spec.start_from) == ("redrafter", tmp_path)
    assert spec.config == RedrafterConfig(**OPTIONS["redrafter"], beam_width=7)
    with pytest.raises(ValueError, match=r"exit_width is 8, and 16 in that drafter.*leave drafter.start_from out"):
        parse_drafter({**options, "exit_width": 8})


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size"])
def test_a_target_of_another_shape_is_refused_with_the_remedy(target: HFTarget, tmp_path: Path, name: str) -> None:
    save("redrafter", target, tmp_path)
    with pytest.raises(ValueError, match=rf"{name}: \d+ for the drafter, 12345 for this target.*from fresh weights"):
        build_drafter(parse_drafter({"start_from": str(tmp_path)}), changed(target, **{name: 12345}))


def test_another_tokenizer_is_warned_of(target: HFTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save("redrafter", target, tmp_path)
    build_drafter(parse_drafter({"start_from": str(tmp_path)}), target)
    assert not caplog.records
    build_drafter(parse_drafter({"start_from": str(tmp_path)}), changed(target, tokenizer_sha256="0" * 64))
    assert "another tokenizer" in caplog.text


def test_other_weights_have_another_digest(target: HFTarget, tmp_path: Path) -> None:
    digests = []
    for kind in ("medusa", "redrafter"):
        save(kind, target, tmp_path / kind)
        digests.append(starting_weights(parse_drafter({"start_from": str(tmp_path / kind)})))
    assert None not in digests
    assert len(set(digests)) == 2
    assert starting_weights(parse_drafter({"kind": "medusa", "start_from": None})) is None
