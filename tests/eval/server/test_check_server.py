"""`outrider check-server` against a server of our own: a sound one passes, and each fault is found and named."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.chat import encode_prompt
from outrider.data.suites import Prompt
from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.eval.server import check as checks
from outrider.eval.server import client
from outrider.eval.server.draft_counts import DraftCounts, drafts_of_reply
from outrider.eval.server.questions import Question, ask, is_right
from outrider.eval.server.readings import Reading, ServerThere, TargetHere
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ...commands import Result, invoke
from ...tiny_models import save_tiny_target
from .served import Served, serving

CHAIN = "{tree_nodes: 4}"
PROMPTS = (
    "import os",
    "import re",
    "def add(a, b):",
    "def main(args):",
    "class Queue:",
    "for line in lines:",
    "if x is None:",
    "try:",
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> HFTarget:
    return load(tiny_target_dir)


def load(folder: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(folder), dtype="float32"), torch.device("cpu"))


@pytest.fixture(name="check")
def run_check(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """Check a server; return the command's result, and the JSON file if there is one."""
    monkeypatch.delenv(client.KEY_VARIABLE, raising=False)

    prompts = tmp_path / "short.jsonl"
    records = [{"id": text, "prompt": text, "category": text.split()[0]} for text in PROMPTS]
    prompts.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    def run(url: str, *options: str, folder: Path = tiny_target_dir) -> tuple[Result, dict[str, Any]]:
        output = tmp_path / "check.json"
        usual = ("--target", str(folder), "--suites", str(prompts), "--max-new-tokens", "24")
        quick = ("--concurrency", "2", "--repeats", "1", "--samples", "0", "--tolerance", "0.01", "--output", str(output))
        result = invoke(["check-server", url, *usual, *quick, *options])
        return result, json.loads(output.read_text()) if output.exists() else {}

    return run


def served(target: HFTarget, name: str | None = "prompt_lookup", *, is_llama_cpp: bool = False, **setting: Any) -> Served:
    drafter = load_drafter(parse_drafter_name(name), target, **setting) if name else None
    return Served(target, drafter, is_llama_cpp=is_llama_cpp)


@pytest.fixture
def running(target: HFTarget) -> Iterator[Served]:
    with serving(served(target)) as server:
        yield server


def test_a_sound_server_passes_against_the_target_here(check: Any, target: HFTarget) -> None:
    options = ("--drafter", "prompt_lookup", "--settings", CHAIN, "--samples", "64")
    with serving(served(target, tree_nodes=4)) as server:
        result, found = check(server.url + "/v1", *options)
    assert result.exit_code == 0, result.output
    assert "\nPASS: the server's text is the reference's" in result.output
    assert [line["passed"] for line in found["lines"]] == [True] * 5
    assert found["drafts"]["server"] == found["drafts"]["here"], "by depth and category"
    assert len(found["drafts"]["here"]["all"]["by_depth"]) == 4
    assert found["drafts"]["here"]["all"]["by_depth"][0] > 0
    assert found["speeds"][0]["tokens_per_second"] > 0
    assert found["environment"]["num_threads"] == torch.get_num_threads()


def test_eval_prints_the_table_of_a_server(check: Any, target: HFTarget, tiny_target_dir: Path, tmp_path: Path) -> None:
    """`eval --engine` has the figures of `check-server`, under its own options."""
    with serving(served(target, tree_nodes=4)) as server:
        usual = ("--target", str(tiny_target_dir), "--suites", str(tmp_path / "short.jsonl"), "--max-new-tokens", "24")
        drafts = ("--drafter", "prompt_lookup", "--settings", CHAIN, "--output", str(tmp_path / "engine"))
        _, expected = check(server.url, *drafts[:4])
        result = invoke(["eval", "--engine", server.url, *usual, *drafts])
        found = json.loads((tmp_path / "engine" / "check-server.json").read_text())
        assert result.exit_code == 0, result.output
        assert found["drafts"] == expected["drafts"]
        assert "Accepted by depth" in result.output
        assert [line["num_cases"] for line in found["lines"]] == [len(PROMPTS)] * 2, "text and drafts, once"
        assert found["speeds"][0]["tokens_per_second"] > 0
        for wrong, message in (
            (["--temperatures", "1"], "eval.temperatures"),
            (["--repeats", "5"], "eval.repeats"),
            (["--drafter", "suffix"], "one drafter"),
            (["--launch", "pipeline_cpu"], "leave tuned and launch out"),
            (["--output", str(tmp_path / "short.jsonl")], "can't be written"),
            (
                ["--output", str(tmp_path / "new" / "folder"), "--limit", "8", "--max-new-tokens", "9999"],
                "no prompt leaves room",
            ),
        ):
            result = invoke(["eval", "--engine", server.url, *usual, *drafts, *wrong])
            assert result.exit_code == 2
            assert message in result.output
        assert not (tmp_path / "new").exists(), "an error leaves no folder"
        for urls in (["eval", "--engine", ""], ["check-server", ""], ["check-server", server.url, "--without", ""]):
            result = invoke([*urls, *usual, "--drafter", "prompt_lookup"])
            assert result.exit_code == 2
            assert "is not an address" in result.output


@pytest.mark.slow
def test_another_server_is_the_reference_and_the_baseline(check, target, monkeypatch):
    monkeypatch.setattr(checks, "SAMPLED_TOKENS", 2)
    with serving(served(target)) as server, serving(served(target, None)) as plain:
        result, found = check(server.url, "--without", plain.url, "--samples", "64")
        assert result.exit_code == 0, result.output
        assert found["speeds"][0]["speedup"] > 0
        assert "x [" in found["verdict"]
        # A server that writes other tokens than this reference.
        server.wrong_one_in = 10
        result, found = check(server.url, "--without", plain.url)
    assert result.exit_code == 1
    assert "wrong tokens" in found["verdict"]


@pytest.mark.parametrize("reference", [(), ("--without",)])
def test_a_server_that_streams_the_last_token_of_a_character_is_asked_for_all(check, target, reference):
    with serving(served(target, is_llama_cpp=True)) as server, serving(served(target, None, is_llama_cpp=True)) as plain:
        server.holds_characters = plain.holds_characters = True
        options = (*reference, plain.url) if reference else ("--samples", "64")
        result, found = check(server.url, "--limit", "3", *options)
    assert result.exit_code == 0, result.output
    assert all(line["passed"] for line in found["lines"])


def test_a_reference_that_would_end_says_how_probable_another_token_is(target: HFTarget, monkeypatch) -> None:
    """llama.cpp gives no probabilities where it chooses a stop token."""
    prompt = target.tokenizer("def add(a, b):").input_ids
    steps = generate(target, NullDrafter(), GreedyAcceptance(), torch.tensor([prompt]), max_new_tokens=3)
    first, stop, _ = [token for step in steps for token in step.tokens[0]]
    other = int(target.plain_logits(torch.tensor([[*prompt, first]]), 1)[0, 0].topk(2).indices[1])
    monkeypatch.setattr(HFTarget, "stop_ids", (stop,))
    reply = client.Reply(tokens=[first, other], ended=False, tops=[], seconds=1.0, first_seconds=1.0)
    (here,) = TargetHere(target=target).read(prompt, [reply])
    with serving(served(target, None, is_llama_cpp=True)) as server:
        there = client.Server(server.url, target.tokenizer, target.vocab_size, target.stop_ids)
        (read,) = ServerThere(server=there, stop_ids=target.stop_ids).read(prompt, [reply])
    assert [(reading.deficit, reading.own) for reading in read] == [
        pytest.approx((reading.deficit, reading.own), abs=1e-4) for reading in here
    ]
    assert read[1].deficit > 0


@pytest.mark.parametrize("text", ['{"content": "a", "tokens": [1], "stop_type": "limit"}', '{"error":\n"busy"}'])
def test_a_reply_that_is_no_stream_is_read_whole(target: HFTarget, text: str, monkeypatch) -> None:
    with serving(served(target, None, is_llama_cpp=True)) as server:
        there = client.Server(server.url, target.tokenizer, target.vocab_size, target.stop_ids)
        parts = [(0.0, text[:9]), (0.0, text[9:] + "\n")]
        monkeypatch.setattr(there, "_parts", lambda *_: iter(parts))
        if "error" in text:
            with pytest.raises(ValueError, match="busy"):
                there.complete([1, 2], max_tokens=1)
        else:
            assert there.complete([1, 2], max_tokens=1).tokens == [1]


def test_as_many_requests_are_under_way_as_it_says(check: Any, target: HFTarget) -> None:
    with serving(served(target)) as server, serving(served(target, None)) as plain:
        result, found = check(server.url, "--without", plain.url, "--concurrency", "7", "--limit", "3")
        assert result.exit_code == 0, result.output
        speed = found["speeds"][-1]
        assert speed["concurrency"] == 7
        assert speed["plain_tokens_per_second"] > 0
        for same in (server.url, server.url + "/v1/"):
            refused, _ = check(server.url, "--without", same)
            assert refused.exit_code == 2
            assert "the server itself" in refused.output


@pytest.mark.parametrize(("deficit", "passed"), [(0.25, True), (0.2500001, True), (0.26, False)])
def test_a_difference_of_exactly_the_tolerance_is_a_near_tie(deficit: float, passed: bool, monkeypatch: Any) -> None:
    """bfloat16's logits between 16 and 32 are multiples of an eighth, and log-probabilities are rounded, too."""
    reader = SimpleNamespace(read=lambda *_: [[Reading(deficit=deficit, greater=0.0, own=0.4)]])
    reply = client.Reply(tokens=[1], ended=False, tops=[], seconds=1.0, first_seconds=0.5)
    question = Question(suite="own", prompt=Prompt(id="a", category="", turns=("a",)), ids=[1])
    line = checks.check_tokens(reader, [question], [reply], "", 0.25, lambda: None)
    assert line.passed is passed


def test_one_of_several_models_is_named(check: Any, target: HFTarget) -> None:
    with serving(served(target)) as server:
        server.models = ["other", "served"]
        result, _ = check(server.url)
        assert result.exit_code == 2
        assert "serves other, served" in result.output
        assert "name one by model" in result.output
        assert check(server.url, "--model", "served")[0].exit_code == 0
        result, _ = check(server.url, "--model", "third")
    assert "none of them is model=third" in result.output


def test_a_reference_of_nan_judges_nothing(check: Any, running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_logits = HFTarget.plain_logits
    monkeypatch.setattr(HFTarget, "plain_logits", lambda *arguments: plain_logits(*arguments) * torch.nan)
    result, _ = check(running.url)
    assert result.exit_code == 2
    assert "not numbers (NaN), so they judge nothing" in result.output


def test_one_wrong_token_in_200_is_found(check: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    sharp = {"num_hidden_layers": 2, "initializer_range": 0.5}  # so that an arbitrary token is far from the best
    folder = save_tiny_target(tmp_path / "sharp", LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **sharp)
    with serving(served(load(folder))) as server:
        server.wrong_one_in = 200
        result, found = check(server.url, "--max-new-tokens", "48", folder=folder)
    assert result.exit_code == 1
    assert "Few and far from the best: the server accepts drafts that it should reject" in found["verdict"]
    assert "FAIL" in result.output


@pytest.mark.slow
def test_a_quantised_server_is_found(check: Any, demo_target_dir: Path) -> None:
    coarse = load(demo_target_dir)
    with torch.no_grad():
        for weight in coarse.model.model.layers.parameters():
            if weight.dim() == 2:  # four bits, one scale a row
                scale = weight.abs().amax(1, keepdim=True) / 7
                weight.copy_((weight / scale).round() * scale)
    with serving(served(coarse)) as server:
        result, found = check(server.url, "--tolerance", "0.25", folder=demo_target_dir)
    assert result.exit_code == 1
    assert "one side has other weights (a quantisation, a type, a checkpoint)" in found["verdict"]


@pytest.mark.slow
def test_a_server_that_ignores_temperature_is_found(check: Any, running: Served) -> None:
    running.ignores_temperature = True
    result, found = check(running.url, "--samples", "64")
    assert result.exit_code == 1
    assert found["verdict"].startswith("FAIL: sampled answers")
    assert [line["passed"] for line in found["lines"]] == [True, True, False, True]


@pytest.mark.slow
def test_a_server_that_samples_greedy_answers_beside_sampled_ones_is_found(check: Any, running: Served) -> None:
    running.mixes_temperatures = True
    result, found = check(running.url, "--samples", "64")
    assert result.exit_code == 1
    assert [line["passed"] for line in found["lines"]] == [True, True, True, False]
    assert found["lines"][-1]["subject"].startswith("greedy answers beside sampled ones")


@pytest.mark.slow
def test_a_drafter_that_reads_the_wrong_layers_in_the_server_is_found(check: Any, target: HFTarget, tmp_path: Path) -> None:
    """Its text is right: only the count of accepted drafts shows the fault."""
    torch.manual_seed(0)
    options = {"kind": "eagle3", "depth": 4, "top_k": 1, "tree_nodes": 4}
    right, moved = (build_drafter(parse_drafter({**options, "feature_layers": layers}), target) for layers in ([1], [0]))
    learn_answers(right, target)
    moved.load_state_dict(right.state_dict())
    found = []
    for name, drafter in (("right", right), ("moved", moved)):
        save_drafter(drafter.eval(), tmp_path / name, target.identity)
        with serving(served(target, str(tmp_path / name), is_llama_cpp=True)) as server:
            found.append(check(server.url, "--drafter", str(tmp_path / "right")))
    (sound, _), (wrong, record) = found
    assert sound.exit_code == 0, sound.output
    assert wrong.exit_code == 1, wrong.output
    assert [line["passed"] for line in record["lines"]] == [True, False, True], "only the drafts are worse"
    assert "accepted per step against" in record["verdict"]
    assert "feature layers" in record["verdict"]


def learn_answers(drafter: TrainableDrafter, target: HFTarget, num_depths: int = 4) -> None:
    """Train a drafter of features on the target's own answers to the prompts, until it knows them."""
    asked = [Prompt(id=text, category="", turns=(text,)) for text in PROMPTS]
    prompts = [encode_prompt(prompt.messages(prompt.turns[0]), target.tokenizer)[0].tolist() for prompt in asked]
    texts = []
    for prompt in prompts:
        steps = generate(target, NullDrafter(), GreedyAcceptance(), torch.tensor([prompt]), max_new_tokens=24)
        texts.append([*prompt, *(token for step in steps for token in step.tokens[0])])
    size = max(map(len, texts))
    ids = torch.zeros(len(texts), size, dtype=torch.long)
    labels = torch.full((len(texts), size, num_depths + 1), UNKNOWN)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        for column in range(len(prompts[row]) - 1, len(text) - 1):
            known = text[column + 1 : column + 2 + num_depths]
            labels[row, column, : len(known)] = torch.tensor(known)
    _, features = target.hidden_states(ids, drafter.feature_layers)
    batch = DrafterBatch(
        input_ids=ids,
        attention_mask=torch.arange(size) < torch.tensor([[len(text)] for text in texts]),
        positions=labels[:, :, 0] != UNKNOWN,
        continuations=labels,
        features=features,
    )
    optimizer = torch.optim.AdamW([weight for weight in drafter.parameters() if weight.requires_grad], lr=4e-3)
    for _ in range(60):
        loss = drafter.loss(batch, Objective())
        optimizer.zero_grad()
        (loss.sums.sum() / loss.counts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"num_prompt_tokens": 7}, "adds tokens to prompts"),
        ({"ignores_limit": True}, "was asked for 24 tokens and sent 27"),
        ({"error": "out of memory: key sk-secret\x1b[2J"}, "answers 500: out of memory: key *** [2J"),
        ({"num_drafted_each": 0}, "/metrics is wrong"),
        ({"stalls": True}, "sent nothing for 0 s"),
        ({"trickle": 0.05}, "gave no complete reply within 0 s"),
        ({"trickle": 0.0}, "answers with more than 1,000,000 bytes"),
        ({"writes_nothing": True, "reason": "length"}, "was asked for 24 tokens and sent none"),
        ({"reason": "abort"}, "ended an answer for the reason 'abort'"),
        ({"num_written_at_most": 3}, "was asked for 24 tokens and cut its answer after 3"),
        ({"event": {"error": {"message": "out of memory"}}}, "out of memory"),
        ({"event": {"choices": [], "usage": {"prompt_tokens": "abc"}}}, "where usage.prompt_tokens: Input should be"),
        ({"metric": "1e999"}, "/metrics has 1e999 for drafts"),
        ({"metric": "1.2.3"}, "/metrics has 1.2.3 for drafts"),
        ({"status_of_get": 307}, "answers 307: http://elsewhere/"),
    ],
)
def test_a_server_that_fails_or_lies_is_named(check, running, fault, words, monkeypatch):
    monkeypatch.setenv(client.KEY_VARIABLE, "sk-secret")
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.3 if "stalls" in fault else 60.0)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.3 if fault.get("trickle") else 60.0)
    monkeypatch.setattr(client, "MOST_REPLY_BYTES", 1_000_000)
    for name, value in fault.items():
        setattr(running, name, value)
    result, found = check(running.url)
    assert result.exit_code == 2
    message = result.message
    assert words in message
    assert running.url in message
    assert "sk-secret" not in message
    assert not found
    assert running.keys <= {"Bearer sk-secret"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"num_tops": 1}, "gives the log-probabilities of 1 tokens and was asked for 20"),
        ({"spoilt_logprob": float("nan")}, "should be a finite number"),
    ],
)
def test_a_reference_without_probabilities_judges_nothing(
    check: Any, target: HFTarget, running: Served, fault: dict[str, Any], words: str
) -> None:
    running.wrong_one_in = 10
    with serving(served(target, None)) as plain:
        for name, value in fault.items():
            setattr(plain, name, value)
        result, found = check(running.url, "--without", plain.url)
    assert words in result.message
    assert not found


@pytest.mark.parametrize("is_llama_cpp", [False, True])
def test_drafts_that_a_server_tells_with_each_answer_are_read(check: Any, target: HFTarget, is_llama_cpp: bool) -> None:
    with serving(served(target, is_llama_cpp=is_llama_cpp, tree_nodes=4)) as server:
        server.counts_drafts, server.tells_drafts = False, True
        result, found = check(server.url, "--drafter", "prompt_lookup", "--settings", CHAIN)
    assert result.exit_code == 0, result.output
    there, here = (found["drafts"][side]["all"] for side in ("server", "here"))
    if is_llama_cpp:  # its steps are computed from its tokens, and here the last step of an answer may accept more than these
        assert (there["accepted"], there["drafted"], there["by_depth"]) == (here["accepted"], here["drafted"], [])
        assert 0 < there["steps"] <= here["steps"]
        assert here["by_depth"][0] > 0
    else:
        assert there == here


@pytest.mark.parametrize(
    ("metrics", "timings", "expected"),
    [
        (None, None, None),
        ([], "fast", None),
        ({"speculative_decoding": {"num_spec_steps": 3}}, {"draft_n": None}, None),
        (None, {"predicted_ms": 7.0}, (9, 0, 0, ())),  # llama.cpp, whose drafter proposed nothing
        (None, {"draft_n": 12, "draft_n_accepted": 4}, (5, 12, 4, ())),
        (
            {
                "speculative_decoding": {
                    "num_spec_steps": 5,
                    "num_draft_tokens": 10,
                    "num_accepted_draft_tokens": 4,
                    "acceptance_histogram": [2, 2, 1],
                }
            },
            None,
            (5, 10, 4, (3, 1)),
        ),
    ],
)
def test_counts_that_come_with_an_answer_are_read_or_left(metrics: Any, timings: Any, expected: Any) -> None:
    found = drafts_of_reply(metrics, timings, 10)
    assert (found and (found.steps, found.drafted, found.accepted, found.by_depth)) == expected


@pytest.mark.parametrize(
    ("there", "advice"), [((10, 40, 1), "compare the drafter's weights"), ((10, 20, 1), "give eval.settings the server's form")]
)
@pytest.mark.parametrize("swaps", [False, True])
def test_other_acceptance_is_explained_by_the_number_of_drafts(there: Any, advice: str, swaps: bool) -> None:
    """A server that accepts less fails; one that accepts far more passes with the same advice."""
    sides = [
        [DraftCounts(steps=steps, drafted=drafted, accepted=accepted, by_depth=())] * 8
        for steps, drafted, accepted in (there, (10, 40, 20))
    ]
    line = checks.check_drafts(*(sides[::-1] if swaps else sides), seed=0)
    assert line.passed is swaps
    assert advice in line.result


def test_a_server_that_should_draft_and_counts_no_drafts_fails(check: Any, target: HFTarget) -> None:
    with serving(served(target, None)) as server:
        result, found = check(server.url, "--drafter", "prompt_lookup", "--settings", CHAIN)
    assert result.exit_code == 1
    assert "counts none at /metrics" in found["verdict"]


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-sécret", "sk secret"])
def test_a_key_that_no_header_carries_is_never_shown(
    check: Any, running: Served, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(client.KEY_VARIABLE, key)
    result, _ = check(running.url)
    assert result.exit_code == (0 if key.isascii() and " " not in key else 2)
    assert key.strip() not in result.output + str(result.message)


def test_an_error_does_not_wait_for_other_requests(target: HFTarget, running: Served) -> None:
    running.stalls = True
    tokenizer = target.tokenizer
    server = client.Server(running.url, tokenizer, target.vocab_size, sorted(target.stop_ids))
    asked = [Question(suite="s", prompt=Prompt(id=str(size), category="", turns=("x",)), ids=[1] * size) for size in (1, 2)]
    complete, started = server.complete, time.perf_counter()
    server.complete = lambda ids, **options: 1 / 0 if len(ids) > 1 else complete(ids, **options)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        ask(server, asked, concurrency=2, max_new_tokens=4, told=lambda: None)
    assert time.perf_counter() - started < client.SILENT_SECONDS / 4


def test_no_server_and_no_address_are_errors(check: Any) -> None:
    assert "can't be read (ConnectError" in check("http://127.0.0.1:9")[0].message
    assert "the server's URL is not an address of the form" in check("127.0.0.1")[0].message
    assert "drafter is not given; give both" in check("http://127.0.0.1:9", "--settings", CHAIN)[0].message


def test_text_alone_is_tokenized_again_and_said(check: Any, running: Served) -> None:
    running.gives_text = True
    result, found = check(running.url, "--max-new-tokens", "8")
    assert "gives text, not token ids" in result.output
    assert found["notes"]


@pytest.mark.parametrize(
    ("suite", "text", "is_good"),
    [
        ("gsm8k", "So she has 1,018 dollars.", True),
        ("gsm8k", "16 - 3 = 13", False),
        ("gsm8k", "None.", False),
        ("human_eval", "```python\ndef twice(x):\n    return 2 * x\n```", True),
        ("human_eval", "    return 2 * x\n", True),
        ("human_eval", "    return x\n", False),
        ("human_eval", "    while True: pass\n", False),
        ("human_eval", "    import os\n    return 2 * x if not os.environ.get('OPENAI_API_KEY') else 0\n", True),
        ("human_eval", "    return 2 * x # \0", False),
        ("human_eval", f"    return 2 * x{' ' * 300_000}\n", True),
        ("mt_bench", "anything", None),
    ],
)
def test_answers_are_scored(suite: str, text: str, is_good: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.eval.server.questions.RUN_SECONDS", 2.0)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    solutions = {"gsm8k": "9 * 113.1 = <<>>\n#### 1018", "human_eval": "def check(f):\n    assert f(3) == 6\ncheck(twice)"}
    prompt = Prompt(id="1", category="c", turns=("def twice(x):\n",), solution=solutions.get(suite))
    question = Question(suite=suite, prompt=prompt, ids=[1])
    assert is_right(question, text, may_run=True) is is_good
    if suite == "human_eval":
        assert is_right(question, text, may_run=False) is None, "nothing runs unless it was asked for"
