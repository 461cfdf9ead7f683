"""The command `outrider certify`: correct decoders pass, and wrong ones fail."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.certify import certificate as certify
from outrider.models.decoding import Sampling, SpeculativeSampling, TypicalAcceptance
from outrider.models.decoding.sampling import warp
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.group_search import GroupDrawing
from outrider.models.llm import cuda_graphs as graphs
from outrider.models.llm import loading as targets
from outrider.models.llm import tree_attention
from outrider.models.llm.hf_target import HFTarget

from ...commands import invoke
from ...models.recorder import ReplayingRecorder
from ..test_run import AcceptsAnything


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "SHAPES", {"2 x 2": certify.SHAPES["2 x 2"]})
    monkeypatch.setattr(certify, "SAMPLINGS", {"top-k 2": certify.SAMPLINGS["top-k 2"]})
    monkeypatch.setattr(certify, "LARGE_SHAPES", ("one token",))
    monkeypatch.setattr(certify, "NUM_SAMPLES", 20_000)


@pytest.fixture
def decoding(tiny_target_dir: Path, tiny_drafter_dir: Path, questions: Path, tmp_path: Path) -> list[str]:
    return [
        *("--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(tmp_path / "certificate.json")),
        *("--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "6", "--device", "cpu", "--no-rules"),
    ]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_target_and_a_drafter_are_certified(decoding: list[str], dtype: str, tmp_path: Path) -> None:
    result = invoke(["certify", *decoding, "--dtype", dtype])
    assert result.exit_code == 0, result.output
    assert "LOSSLESS" in result.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["passed"]
    exact = "the" if dtype == "float32" else "every"
    assert [line["method"].split()[0] for line in certificate["lines"]] == [exact, exact, exact, "G-tests"]
    assert [line["num_cases"] for line in certificate["lines"]] == [2, 2, 2, certify.SAMPLED_TOKENS - 1]
    assert "4 prompts at a time" in certificate["lines"][2]["subject"]
    oracle = certificate["lines"][0]["subject"]
    assert "an oracle drafter (drafts the right answers)" in oracle
    assert int(oracle.split()[-5]) > 4, "accepted paths were not exercised"
    assert certificate["false_alarm_rate"] == pytest.approx(3 * certify.FALSE_ALARM_RATE)


@pytest.mark.slow
def test_a_compiled_target_is_certified_compiled(decoding: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # traced and run, without a C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    result = invoke(["certify", *decoding, "--compiled"])
    assert result.exit_code == 0, result.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert (certificate["passed"], certificate["dtype"], certificate["form"]) == (True, "float32", "compiled")
    assert all("float32 compiled, " in line["subject"] for line in certificate["lines"])


def test_a_graphed_certificate_replays_target_and_drafter(
    decoding: list[str], tiny_target: HFTarget, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An evaluation replays both. A replayed target beside an eager drafter is another decoder."""
    recorders: list[ReplayingRecorder] = []

    def make_recorder() -> ReplayingRecorder:
        recorders.append(ReplayingRecorder())
        return recorders[-1]

    monkeypatch.setattr(graphs, "CudaGraphRecorder", make_recorder)
    target = HFTarget(tiny_target.model, tiny_target.tokenizer, tiny_target.identity, cuda_graphs=True)
    monkeypatch.setattr(targets, "load_target", lambda config, **options: target)
    torch.manual_seed(0)
    options = {"kind": "redrafter", "beam_width": 2, "beam_length": 3, "tree_nodes": 4}
    save_drafter(build_drafter(parse_drafter(options), tiny_target), tmp_path / "drafter", tiny_target.identity)
    arguments = [str(tmp_path / "drafter") if word == str(tiny_drafter_dir) else word for word in decoding]
    result = invoke(["certify", *arguments, "--cuda-graphs"])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "certificate.json").read_text())["form"] == "cuda_graphs"
    assert len(recorders) > 3, "of the target, of the drafter, and of the rules"
    replays = sorted(recorder.num_replays for recorder in recorders)
    assert min(replays[-3:]) > 10, "of the target, of its commits and of the drafter"
    assert all(recorder.num_replays > 1 for recorder in recorders)


def test_cuda_graphs_on_a_cpu_are_refused_before_anything_is_loaded(
    decoding: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_load_model", None)
    result = invoke(["certify", *decoding, "--cuda-graphs"])
    assert "choose a CUDA device, or turn it off" in result.message
    result = invoke(["certify", "--cuda-graphs"])
    assert "target.name_or_path is missing" in result.message


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_wrong_tokens_fail_in_any_precision(
    decoding: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(certify, "GreedyAcceptance", AcceptsAnything)
    result = invoke(["certify", *decoding, "--dtype", dtype])
    assert result.exit_code == 1
    assert "NOT LOSSLESS" in result.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert not certificate["passed"]
    assert [line["passed"] for line in certificate["lines"]] == [False, False, False, True]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_target_that_misreads_trees_fails_in_any_precision(
    decoding: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sound = tree_attention.tree_attention_mask

    def everybody_sees_everybody(lineage: torch.Tensor, *options: Any) -> torch.Tensor:
        if lineage.shape[1] <= 3:  # as many nodes as the probe has
            return sound(lineage, *options)
        some_node = torch.arange(lineage.shape[1]).expand(*lineage.shape[:2], -1)
        return sound(some_node[:, :1].expand(-1, lineage.shape[1], -1), *options)

    monkeypatch.setattr(tree_attention, "tree_attention_mask", everybody_sees_everybody)
    assert invoke(["certify", *decoding, "--dtype", dtype, "--max-new-tokens", "24"]).exit_code == 1
    assert not json.loads((tmp_path / "certificate.json").read_text())["lines"][0]["passed"]


@pytest.mark.parametrize("mistake", ["temperature", "drafts accepted too often"])
def test_samples_of_another_distribution_fail_the_certificate(
    decoding: list[str], mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = {
        "temperature": SpeculativeSampling(sampling=Sampling(temperature=0.7)),
        "drafts accepted too often": TypicalAcceptance(sampling=Sampling(), epsilon=0.002, delta=1.0),
    }
    monkeypatch.setattr(certify, "SpeculativeSampling", lambda sampling: wrong[mistake])
    assert invoke(["certify", *decoding]).exit_code == 1
    lines = json.loads((tmp_path / "certificate.json").read_text())["lines"]
    assert [line["passed"] for line in lines] == [True, True, True, False]


def top_tokens_for_draws(self: GroupDrawing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the most probable tokens, and record that they were drawn."""
    self._probs.append(warp(logits, self.sampling))
    top = self._probs[-1].topk(self.num_children)
    return top.indices, top.values.log()


@pytest.mark.parametrize(
    ("kind", "sound"), [("eagle", True), ("eagle", False), pytest.param("draft_model", True, marks=pytest.mark.slow)]
)
def test_a_drawn_tree_is_certified_and_a_false_draw_is_not(
    kind: str, sound: bool, decoding: list[str], tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not sound:
        monkeypatch.setattr(GroupDrawing, "children", top_tokens_for_draws)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        options = {"kind": kind, "temperature": 1.0, "top_k": 2, "tree_nodes": 6}
        save_drafter(build_drafter(parse_drafter(options), tiny_target), tmp_path / "drafter", tiny_target.identity)
    result = invoke(["certify", *decoding, "--drafter", str(tmp_path / "drafter")])
    assert result.exit_code == (0 if sound else 1), result.output
    lines = json.loads((tmp_path / "certificate.json").read_text())["lines"]
    assert [line["passed"] for line in lines] == [*[True] * (len(lines) - 1), sound]
    assert "sampled" in lines[-1]["subject"]
    assert int(lines[-1]["subject"].split()[-5]) > 100, "few draws were accepted"


@pytest.mark.usefixtures("few_cases")
def test_the_rules_are_certified_and_a_lossy_rule_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    result = invoke(["certify", "--output", str(path)])
    assert result.exit_code == 0, result.output
    certificate = json.loads(path.read_text())
    lines = certificate["lines"]
    assert len(lines) == 15
    assert all(line["num_cases"] for line in lines)
    # one G-test for each drawing
    assert certificate["false_alarm_rate"] == pytest.approx(3 * certify.FALSE_ALARM_RATE)
    assert "at most 3.0e-06" in result.output.replace("\n", " ")
    typical = [line for line in lines if line["subject"].startswith("typical")]
    assert len(typical) == 3
    assert all(line["result"].startswith("not lossless: total variation at most") for line in typical)
    assert {line["passed"] for line in typical} == {None}
    assert all(line["passed"] for line in lines if line not in typical)
    monkeypatch.setattr(certify, "_rule", lambda sampling: TypicalAcceptance(sampling=sampling))
    result = invoke(["certify", "--output", str(path)])
    assert result.exit_code == 1
    lines = json.loads(path.read_text())["lines"]
    assert {line["passed"] for line in lines if line["subject"].startswith(("speculative", "the sampler"))} == {False}


def test_an_incomplete_request_is_refused(tiny_target_dir: Path) -> None:
    result = invoke(["certify", "--target", str(tiny_target_dir)])
    assert "target and drafter go together" in result.message
    result = invoke(["certify", "--no-rules"])
    assert "nothing to certify" in result.message


class Absent:
    lossless, is_random = True, True

    def __init__(self, sampling) -> None:
        self.rule = certify.SpeculativeSampling(sampling=sampling)

    def __call__(self, tree, output, *, generator=None):
        if hasattr(generator, "weight"):
            generator.weight = generator.weight * float("nan")
        return self.rule(tree, output, generator=generator)


@pytest.mark.usefixtures("few_cases")
def test_nan_probabilities_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "_rule", Absent)
    enumerated = [line for line in certify.certify_rules() if line.subject.startswith("speculative")]
    assert len(enumerated) == 6
    assert not any(line.passed for line in enumerated)
