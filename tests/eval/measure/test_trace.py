"""The trace of an evaluation's drafts: what it counts is what was decoded, and a miss is seen where it is."""

import json
from typing import Any

import pytest
import torch

from outrider.eval.measure.trace import search_ends, trace_drafts
from outrider.eval.report.page import write_report
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.beams import SearchTree
from outrider.models.drafters.graphed import graphed

from ...commands import invoke
from ...models.recorder import ReplayingRecorder

PROMPTS = [torch.tensor([1, 70, 71, 72, 2]), torch.tensor([9, 8, 7])]
SEARCH = SearchTree(
    tokens=torch.tensor([[5, 6, 7, 8]]),
    parents=torch.tensor([[-1, -1, 0, 0]]),
    scores=torch.zeros(1, 4),
    level_sizes=(2, 2),
)


@pytest.mark.parametrize(
    ("drafts", "token", "end"),
    [
        ([], 5, "r"),
        ([], 9, "m"),
        ([5], 8, "r"),
        ([5], 9, "m"),
        ([5, 7], 1, "f"),
        ([6], 7, "m"),
        ([1], 2, "m"),
        ([6, 1], 2, "m"),
    ],
)
def test_a_token_is_looked_for_after_the_accepted_path(drafts, token, end):
    assert search_ends(SEARCH, 0, drafts, token) == end


@pytest.mark.parametrize(("options", "end"), [({"top_k": 3, "tree_nodes": 1}, "r"), ({"top_k": 1}, "f")])
def test_the_steps_are_those_of_decoding_and_a_small_tree_leaves_tokens_out(options, end, tiny_target):
    torch.manual_seed(0)
    layers = {"kind": "draft_model", "num_layers": tiny_target.model.config.num_hidden_layers, "init": "target_layers"}
    drafter: Any = build_drafter(parse_drafter({**layers, "length": 3, **options}), tiny_target)
    drafter = drafter.to(tiny_target.dtype).eval()
    decode = {"max_new_tokens": 12, "stop_ids": ()}
    steps = list(generate(tiny_target, drafter, GreedyAcceptance(), PROMPTS, **decode))
    traces = trace_drafts(tiny_target, drafter, GreedyAcceptance(), tiny_target.tokenizer, PROMPTS, seeds=[0, 1], **decode)
    for row, trace in enumerate(traces):
        of_row = [step for step in steps if row in step.rows and not step.is_prefill]
        assert trace.accepted == [step.num_accepted[step.rows.index(row)] for step in of_row]
        assert len(trace.texts) == 12
        assert trace.prompt_ids == PROMPTS[row].tolist()
        assert trace.ends[-1] == "."
        assert all(0 < probability <= 1 for probability in trace.probabilities)
        assert set(trace.ends[:-1]) == {end}, "the target drafts for itself, so it is right as far as its tree goes"
    assert "search" not in vars(drafter)


def test_a_merge_knows_which_of_its_parts_had_a_token(tiny_target, tiny_drafter_dir):
    merged = load_drafter(f"{tiny_drafter_dir}+suffix", tiny_target, pace="fixed", tree_nodes=6)
    options = {"seeds": [0, 1], "max_new_tokens": 12, "stop_ids": ()}
    traces = trace_drafts(tiny_target, merged, GreedyAcceptance(), tiny_target.tokenizer, PROMPTS, **options)
    ends = "".join(trace.ends for trace in traces)
    assert ends.count(".") == 2
    assert set(ends) <= set(".-rmf")
    free = load_drafter("suffix", tiny_target)
    (trace, _) = trace_drafts(tiny_target, free, GreedyAcceptance(), tiny_target.tokenizer, PROMPTS, **options)
    assert set(trace.ends) <= set(".-m")


@pytest.mark.parametrize("name", ["alone", "merged"])
def test_a_recorded_drafter_is_traced_like_the_drafter_itself(name, tiny_target, tiny_drafter_dir):
    drafter: Any = load_drafter(tiny_drafter_dir, tiny_target, tree_nodes=4)
    if name == "merged":
        drafter = load_drafter(f"{tiny_drafter_dir}+suffix", tiny_target, pace="fixed", tree_nodes=6)
    options = {"seeds": [0, 1], "max_new_tokens": 12, "stop_ids": ()}
    expected, traced = (
        trace_drafts(tiny_target, one, GreedyAcceptance(), tiny_target.tokenizer, PROMPTS, **options)
        for one in (drafter, graphed(drafter, ReplayingRecorder()))
    )
    assert traced == expected
    assert {"m", "r"} & set("".join(trace.ends for trace in traced)), "no search was seen"


def test_the_command_explains_a_finished_evaluation(tiny_target_dir, tiny_drafter_dir, questions, tmp_path):
    suite = f"{{name: mt_bench, path: {questions}}}"
    options = ["--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--suite", suite]
    options += ["--max-new-tokens", "12", "--repeats", "1", "--output", str(tmp_path / "eval")]
    result = invoke(["eval", *options, "--profile-prompts", "2"])
    assert result.exit_code == 0, result.output
    result = invoke(["explain", str(tmp_path / "eval")])
    assert result.exit_code == 0, result.output
    assert "ReDrafter" in result.output
    assert "drafts missed a token" in " ".join(result.output.split())
    assert "not learned" in result.output or "uncertain" in result.output
    assert "draft token" in result.output
    assert "no label has this text" in invoke(["explain", str(tmp_path / "eval"), "--method", "medusa"]).message
    assert "not a finished evaluation" in invoke(["explain", str(tmp_path)]).message
    page = write_report([tmp_path / "eval"], tmp_path / "report").read_text()
    assert "Why drafts end" in page
    records = tmp_path / "eval" / "records.jsonl"
    lines = [json.dumps({**json.loads(line), "drafts": None}) for line in records.read_text().splitlines()]
    records.write_text("\n".join(lines) + "\n")
    assert "eval.profile_prompts, which is 0 here" in invoke(["explain", str(tmp_path / "eval")]).message
    assert "Why drafts end" not in write_report([tmp_path / "eval"], tmp_path / "report").read_text()
    assert "share of misses by cause" in page
    (tmp_path / "eval/records.jsonl").unlink()  # as in a record that is kept
    assert "Why drafts end" not in write_report([tmp_path / "eval"], tmp_path / "report").read_text()
