"""The command `outrider certify`: correct decoders pass, and wrong ones fail."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.certify import certificate as certify
from outrider.eval.certify import samples
from outrider.eval.records.run_files import Audit
from outrider.models.decoding import Sampling, SpeculativeSampling, TypicalAcceptance
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter, save_drafter
from outrider.models.export.package import CertificateLine, read_certificate
from outrider.models.llm import cuda_graphs as graphs
from outrider.models.llm import loading as targets
from outrider.models.llm import tree_attention
from outrider.models.llm.hf_target import HFTarget

from ...commands import invoke
from ...models.recorder import ReplayingRecorder
from ..test_run import AcceptsAnything


@pytest.fixture
def decoding(tiny_target_dir: Path, tiny_drafter_dir: Path, questions: Path, tmp_path: Path) -> list[str]:
    return [
        *("--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(tmp_path / "certificate.json")),
        *("--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "6", "--device", "cpu"),
    ]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_target_and_a_drafter_are_certified(decoding, dtype, monkeypatch, tmp_path):
    decoded_plainly: list[NullDrafter] = []

    def null_drafter() -> NullDrafter:
        decoded_plainly.append(NullDrafter())
        return decoded_plainly[-1]

    monkeypatch.setattr(certify, "NullDrafter", null_drafter)
    result = invoke(["certify", *decoding, "--dtype", dtype, "--num-threads", "2"])
    assert result.exit_code == 0, result.output
    assert len(decoded_plainly) == 2, "each prompt once for all checks"
    assert "LOSSLESS" in result.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["passed"]
    assert list(certificate["suites"]) == ["mt_bench"]
    assert certificate["environment"]["num_threads"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["certificate.json"], "finished"
    exact = "the" if dtype == "float32" else "every"
    assert [line["method"].split()[0] for line in certificate["lines"]] == [exact, exact, exact, "G-tests"]
    assert [line["num_cases"] for line in certificate["lines"]] == [2, 2, 2, samples.SAMPLED_TOKENS - 1]
    assert "2 prompts at a time" in certificate["lines"][2]["subject"]
    oracle = certificate["lines"][0]["subject"]
    assert "an oracle drafter (drafts the right answers)" in oracle
    assert int(oracle.split()[-5]) > 4, "accepted paths were not exercised"
    assert certificate["false_alarm_rate"] == pytest.approx(3 * samples.FALSE_ALARM_RATE)
    assert read_certificate(tmp_path / "certificate.json").passed, "a package takes it"


@pytest.mark.slow
@pytest.mark.long
def test_a_compiled_target_is_certified_compiled(decoding: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # traced and run, without a C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(samples, "NUM_SAMPLED_PROMPTS", 1)
    result = invoke(["certify", *decoding, "--compiled", "--max-new-tokens", "3"])
    assert result.exit_code == 0, result.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert (certificate["passed"], certificate["dtype"], certificate["form"]) == (True, "float32", "compiled")
    assert all("float32 compiled, " in line["subject"] for line in certificate["lines"])


@pytest.mark.slow
def test_a_graphed_certificate_replays_target_and_drafter(decoding, tiny_target, tiny_drafter_dir, monkeypatch, tmp_path):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cuda-graphs"], "choose a CUDA device, or turn it off"),
        (["--repeats", "2", "--batch-size", "3"], "eval.batch_sizes, eval.repeats: `outrider certify` doesn't use this"),
    ],
)
def test_options_without_an_effect_are_refused_before_anything_is_loaded(decoding, options, message, monkeypatch):
    monkeypatch.setattr(targets, "_load_model", None)
    assert message in invoke(["certify", *decoding, *options]).message


def test_wrong_tokens_fail_in_low_precision_too(decoding: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certify, "GreedyAcceptance", AcceptsAnything)
    result = invoke(["certify", *decoding, "--dtype", "bfloat16"])
    assert result.exit_code == 1
    assert "NOT LOSSLESS" in result.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert not certificate["passed"]
    assert [line["passed"] for line in certificate["lines"]] == [False, False, False, True]


def test_a_target_that_misreads_trees_fails_in_low_precision_too(decoding, monkeypatch, tmp_path):
    sound = tree_attention.tree_attention_mask

    def everybody_sees_everybody(lineage: torch.Tensor, *options: Any) -> torch.Tensor:
        if lineage.shape[1] <= 3:  # as many nodes as the probe has
            return sound(lineage, *options)
        some_node = torch.arange(lineage.shape[1]).expand(*lineage.shape[:2], -1)
        return sound(some_node[:, :1].expand(-1, lineage.shape[1], -1), *options)

    monkeypatch.setattr(tree_attention, "tree_attention_mask", everybody_sees_everybody)
    assert invoke(["certify", *decoding, "--dtype", "bfloat16", "--max-new-tokens", "24"]).exit_code == 1
    assert not json.loads((tmp_path / "certificate.json").read_text())["lines"][0]["passed"]


@pytest.mark.parametrize("mistake", ["temperature", "drafts accepted too often"])
def test_samples_of_another_distribution_fail_the_certificate(decoding, mistake, monkeypatch, tmp_path):
    wrong = {
        "temperature": SpeculativeSampling(sampling=Sampling(temperature=0.7)),
        "drafts accepted too often": TypicalAcceptance(sampling=Sampling(), epsilon=0.002, delta=1.0),
    }
    monkeypatch.setattr(samples, "SpeculativeSampling", lambda sampling: wrong[mistake])
    assert invoke(["certify", *decoding]).exit_code == 1
    lines = json.loads((tmp_path / "certificate.json").read_text())["lines"]
    assert [line["passed"] for line in lines] == [True, True, True, False]


@pytest.mark.parametrize("explained", [True, False])
def test_rounding_may_explain_another_token_in_a_batch_only(tiny_target: HFTarget, explained: bool) -> None:
    """As in an evaluation: a row's last digits depend on the other rows, in float32, too."""
    prompts = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])]
    plain = certify.PlainAnswers(target=tiny_target, prompts=prompts, max_new_tokens=4)
    other = [*plain.answers[1][:-1], plain.answers[1][-1] + 1]
    plain._audits[1, tuple(other)] = Audit(deficit=1e-6, position=3, noise=1e-6, ends_rightly=True, within_noise=explained)
    answers = [plain.answers[0], other]
    together = plain.compare("drafter", answers, 0, batch_size=2)
    words = "0 answers differ, and 1 within rounding" if explained else "1 answers differ"
    assert (together.passed, together.result) == (explained, words)
    assert not plain.compare("drafter", answers, 0).passed


def test_an_interrupted_certificate_resumes(tmp_path: Path) -> None:
    path, compared = tmp_path / "certificate.json.unfinished", []

    def check(number: int, *, interrupted: bool = False) -> CertificateLine:
        if interrupted:
            raise KeyboardInterrupt
        compared.append(number)
        return CertificateLine(subject=f"check {number}", method="", num_cases=1, result="", passed=True)

    checks = [partial(check, number) for number in range(3)]
    stopped = [*checks[:2], partial(check, 2, interrupted=True)]
    environment = {"linears": {"8x8": "columns first"}}
    request = {"max_new_tokens": 6, "methods": {"redrafter": ("a", "b")}, "environment": environment}
    today = {**request, "environment": {"linears": {}}}
    assert certify.read_unfinished(path, today) is None
    with pytest.raises(KeyboardInterrupt, match=r"2 of 3 comparisons are kept in .*certificate\.json\.unfinished\."):
        certify.run_checks(stopped, path, request)
    kept = certify.read_unfinished(path, today)
    assert kept is not None
    assert kept.request["environment"] == environment, "the linear layers of the lines that are kept"
    assert certify.read_unfinished(path, {**today, "max_new_tokens": 5}) is None, "lines of another request"
    lines = certify.run_checks(checks, path, request, kept)
    assert [line.subject for line in lines] == ["check 0", "check 1", "check 2"]
    assert compared == [0, 1, 2], "each once"
    # Lines with other linear layers don't count.
    certify.run_checks(checks, path, today, kept)
    assert compared == [0, 1, 2, 0, 1, 2]


def test_few_prompts_have_fewer_samples(decoding: list[str], questions: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(questions.read_text().splitlines()[0])
    assert invoke(["certify", *[str(one) if "mt_bench" in word else word for word in decoding]]).exit_code == 0
    line = json.loads((tmp_path / "certificate.json").read_text())["lines"][-1]
    assert line["method"] == f"G-tests of {samples.TEXTS_PER_PROMPT} texts"
