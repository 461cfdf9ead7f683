"""The pace study on tiny models: traces against plain passes, replays, a resume, bad input."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.models.decoding.growth import ConfidenceRule, ExpectedRule
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.saved.loading import load_trained
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROMPTS = ["alpha beta alpha beta", "one two three", "x = x + 1"]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("pace_study")


@pytest.fixture
def traces(study: Any) -> Any:
    return importlib.import_module("pace_traces")


@pytest.fixture
def replays(study: Any) -> Any:
    return importlib.import_module("pace_replay")


def saved(kind: dict[str, Any], tiny_target_dir: Path, root: Path) -> Path:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    torch.manual_seed(0)
    save_drafter(build_drafter(parse_drafter(kind), target), root / "drafter", target.identity)
    return root / "drafter"


@pytest.fixture(scope="module")
def drafter(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = {"kind": "draft_model", "init": "target_layers", "num_layers": 1}
    return saved(kind, tiny_target_dir, tmp_path_factory.mktemp("draft_model"))


@pytest.fixture
def run(study: Any, tiny_target_dir: Path, drafter: Path, tmp_path: Path) -> Callable[..., Path]:
    suite = tmp_path / "own.jsonl"
    suite.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))

    def call(*changes: str) -> Path:
        options = ["--target", str(tiny_target_dir), "--drafter", str(drafter), "--suites", f"own={suite}", "--threads", "1"]
        small = ["--prompts", "3", "--new-tokens", "24", "--reads", "12", "--ratios", "3", "200", "--gammas", "0.5", "1"]
        study.run(study.parse_args([*options, *small, "--output", str(tmp_path / "study"), *changes]))
        return tmp_path / "study"

    return call


def test_the_study_runs_to_the_end_and_resumes(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = run()
    record = json.loads((output / "pace_study.json").read_text())
    methods = [(row["method"], row["ratio"], row.get("gamma")) for row in record["rows"]]
    assert len(methods) == len(set(methods)) == 2 + 2 * 2 * 3
    assert record["texts"] == len(PROMPTS)
    for row in record["rows"]:
        assert 0 < row["tokens_per_draft_pass"] <= row["tokens_per_step"]
        if row["method"] != "best fixed":
            low, high = row["over_best_fixed_ci95"]
            assert low <= row["over_best_fixed"] + 1e-12  # equal ones differ by a rounding
            assert row["over_best_fixed"] <= high + 1e-12
    assert (output / "pace.png").stat().st_size > 1000
    assert "Mark: expected at least 0.95" in (output / "table.md").read_text()
    # A resume makes what is missing only, and gives the same record.
    capsys.readouterr()
    lost = output / "cells" / "200-1.json"
    kept = output / "cells" / "3-1.json"
    lost.unlink()
    before = kept.stat().st_mtime_ns
    run()
    assert "3 traces, 3 of them done; 4 cells, 3 of them done" in capsys.readouterr().out
    assert kept.stat().st_mtime_ns == before
    assert json.loads((output / "pace_study.json").read_text())["rows"] == record["rows"]
    with pytest.raises(ValueError, match="new_tokens"):
        run("--new-tokens", "8")
    run("--plan", "--ratios", "5")
    assert "2 cells, 0 of them done" in capsys.readouterr().out


def test_a_trace_has_the_draft_models_probabilities(traces: Any, tiny_target_dir: Path, drafter: Path, tmp_path: Path) -> None:
    """Contexts on and off the answer, against passes over whole texts."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    model = load_trained(drafter, target).reader  # type: ignore[attr-defined]
    ids, num_tokens, reads = torch.tensor([5, 6, 7, 8]), 12, 8
    trace = traces.trace_answer(target, model, ids, num_tokens, reads)
    path = tmp_path / "a.npz"
    trace.save(path)
    trace = traces.Trace.load(path)
    with torch.inference_mode():
        answer = target.model.generate(ids[None], max_new_tokens=num_tokens, do_sample=False)[0, len(ids) :].tolist()
        answer = answer[: trace.num_tokens]
        # The text of each context: those of the answer, then those below them.
        texts = {position: answer[:position] for position in range(trace.num_tokens + 1)}
        num_checked = 0
        for context in range(len(trace.first) - 1):
            start, end = trace.first[context : context + 2]
            if start == end:
                continue
            text = torch.cat([ids, torch.tensor(texts[context], dtype=torch.long)])
            probs, tokens = model.model(text[None]).logits[0, -1].softmax(-1).topk(traces.TOP_K)
            assert np.allclose(trace.probs[start:end], probs, atol=1e-4)
            for child, token in zip(trace.contexts[start:end].tolist(), tokens.tolist(), strict=True):
                if child != traces.UNREAD:
                    assert texts.setdefault(child, [*texts[context], token]) == [*texts[context], token]
            num_checked += 1
    assert trace.num_tokens > 4, "the answer ended early"
    assert num_checked == trace.num_tokens * (1 + reads), "the answer's positions, and contexts below each"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"a\.npz is damaged"):
        traces.Trace.load(path)


def chain(traces: Any, hits: list[bool], prob: float) -> Any:
    """A trace whose likeliest child is the answer's next token where there is a hit."""
    num_children = traces.TOP_K
    count = len(hits)
    first = [num_children * min(position, count) for position in range(count + 2)]
    probs = [prob, *[(1 - prob) / 100] * (num_children - 1)] * count
    others = [traces.UNREAD] * (num_children - 1)
    contexts = [child for position, hit in enumerate(hits) for child in (position + 1 if hit else traces.UNREAD, *others)]
    return traces.Trace(
        num_tokens=count,
        first=np.array(first, dtype=np.int32),
        probs=np.array(probs, dtype=np.float32),
        contexts=np.array(contexts, dtype=np.int32),
    )


def test_replays_accept_what_follows_the_answer(traces: Any, replays: Any) -> None:
    """The drafter is right twice, then wrong: a step emits at most three tokens, until the end."""
    text = replays.Text(chain(traces, [True, True, False] * 8, 0.8), 1.0)
    fixed = replays.replay_fixed([text])
    steps = {setting.length: count for setting, (count,) in fixed.items() if setting.width == setting.nodes == 1}
    assert steps[1] == 16
    assert {setting.length: count for setting, (count,) in fixed.items() if setting.nodes == 2 and setting.width == 1}[2] == 8
    for rule in (ExpectedRule(replays.MAX_NODES, traces.TOP_K), ConfidenceRule(replays.MAX_NODES)):
        outcome = replays.replay([text], rule, 200.0, calibrated=True)
        assert outcome.tokens == [24]
        assert 8 <= outcome.steps <= 24
        assert outcome.seconds[0] >= outcome.drafts + 200.0 * outcome.steps


def test_ranks_are_those_of_the_likeliest_nodes_of_a_search(traces: Any, replays: Any) -> None:
    """Against a search that is sorted as a whole, at every length and width."""
    rng = np.random.default_rng(0)
    trace = chain(traces, [bool(value) for value in rng.random(30) < 0.7], 0.6)
    trace.probs[:] = rng.random(len(trace.probs)) / 4
    text = replays.Text(trace, 1.0)
    num_checked = 0
    for width in replays.WIDTHS:
        for position in range(0, 30, 3):
            ranks = replays.true_ranks(text, position, width)
            for length in (1, 2, 5, 12):
                nodes, paths = [], [(1.0, position, True)]
                for depth in range(1, length + 1):
                    children = [
                        (above * prob, child, on and child == position + depth)
                        for above, context, on in paths
                        for prob, child in text.children(context)
                    ]
                    paths = sorted(children, key=lambda path: -path[0])[:width]
                    nodes += paths
                expected = [sum(other > prob for other, *_ in nodes) for prob, _, on in nodes if on]
                assert ranks[length] == expected
                num_checked += len(expected)
    assert num_checked > 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompts", "0"), "--prompts is 0"),
        (("--reads", "-2"), "--reads is -2"),
        (("--ratios", "3", "0"), "--ratios has 0"),
        (("--gammas", "-1"), "--gammas has -1"),
        (("--suites", "own=nowhere.jsonl"), r"nowhere\.jsonl"),
        (("--drafter", "nowhere"), "nowhere"),
    ],
)
def test_bad_options_are_named_before_any_work(run: Callable[..., Path], options: tuple[str, ...], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        run(*options)


def test_other_kinds_of_drafters_are_named(run: Callable[..., Path], tiny_target_dir: Path, tmp_path: Path) -> None:
    other = saved({"kind": "redrafter", "beam_width": 2, "beam_length": 3}, tiny_target_dir, tmp_path)
    with pytest.raises(ValueError, match="holds a redrafter"):
        run("--drafter", str(other))
