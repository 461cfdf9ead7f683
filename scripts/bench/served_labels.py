"""What vLLM's answers and hidden states cost beside outrider's own passes (`distill.engine=vllm` and `decoder`).

    python scripts/bench/served_labels.py TARGET --suite mt_bench=question.jsonl --servers 2 --output FILE

Both ways take turns. Each answers the same questions, and then makes shards of labels and hidden states of its answers,
by the functions of `outrider run`, in a new folder. vLLM's servers (in the environment of `make engines`) are idle in
the other way's turns, and share `--threads`. Seconds are those of a whole call. With vLLM they include a text that is
read to compare states, and else the choice of linear layers; `work_seconds` include neither.

Labels are compared on answers that are equal in both ways. vLLM's way gives no labels of what follows a text.
The states of these answers are compared before they are stored, in sixteen bits. `states_differ` is the largest difference
over a layer's largest value; the record has it for each layer (`largest`), and the largest of a token's state over its own
length (`of_a_token`).
"""

import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from report import finish, median, ratio, take_turns
from vllm_servers import running, states_options

from outrider.data.config import DataConfig
from outrider.data.files import read_json
from outrider.data.manifest import STATS_FILE, ShardEntry
from outrider.data.shards import read_shard
from outrider.data.suites import load_suite
from outrider.data.types import UNKNOWN, DistilledExample, Example
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill
from outrider.distill.regenerate.engines.served_states import open_states
from outrider.distill.regenerate.run import regenerate
from outrider.models.drafters.fused_layers import default_feature_layers
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.gguf_files import folder_of
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.hidden_states import decoder_layers
from outrider.models.llm.loading import load_target

OWN, SERVED = "decoder", "vllm"
ANSWERS, LABELS, BOTH = "answers", "labels", "both"
SHARED_MEMORY = Path("/dev/shm")


def main(
    target: str,
    suite: Annotated[list[str], typer.Option(help="NAME=PATH, may be repeated.")],
    output: Annotated[Path, typer.Option(help="The record, in JSON.")],
    dtype: str = "float32",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each suite; their first turns are asked.")] = 16,
    max_length: Annotated[int, typer.Option(help="Most tokens of a question and its answer.")] = 1024,
    max_new_tokens: int = 64,
    servers: Annotated[int, typer.Option(min=1, max=2, help="Servers of vLLM.")] = 1,
    rounds: int = 3,
    threads: Annotated[int, typer.Option(help="Threads of each way; servers share them.")] = 2,
) -> None:
    """Answer and label in both ways; write the seconds, and what differs."""
    options = dict(locals())
    # 1. The target here, and the questions.
    torch.set_num_threads(threads)
    folder = folder_of(target)
    loaded = load_target(TargetConfig(name_or_path=folder, dtype=dtype))
    num_layers = len(decoder_layers(loaded.model))
    layers = default_feature_layers(num_layers)
    with ExitStack() as stack:
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        states = stack.enter_context(tempfile.TemporaryDirectory(dir=memory))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = DataConfig(source="messages", path=str(write_questions(suite, limit, work)), max_length=max_length)
        # 2. The servers. A request for states also asks for a token behind the text.
        serving = {"--model": folder, "--dtype": dtype, "--max-model-len": max_length + 1}
        serving |= states_options([*layers, num_layers], states)
        urls = stack.enter_context(running(serving, servers, max(1, threads // servers)))
        # 3. The ways in turns.
        shared: dict[str, Any] = {"features": "last_hidden", "feature_layers": layers, "max_new_tokens": max_new_tokens}
        served = DistillConfig(engine=SERVED, base_url=",".join(urls), states_dir=states, **shared)
        ways = [Way(config, data, loaded, work) for config in (DistillConfig(engine=OWN, **shared), served)]
        calls = {f"{way.name} {part}": getattr(way, part) for way in ways for part in (ANSWERS, LABELS)}
        seconds = take_turns(calls, rounds=rounds, device=loaded.device)
        wall = {name: each.wall for name, each in seconds.items()}
        found, equal = compared(*(way.examples() for way in ways))
        found["states"] = states_differ(served, loaded, equal)
    tokens = {way.name: sum(int(example.loss_mask.sum()) for example in way.answered) for way in ways}
    finish(output, rows_of(ways, wall, found), options, device=loaded.device, layers=layers, answer_tokens=tokens, **found)


def write_questions(suites: Sequence[str], limit: int, folder: Path) -> Path:
    """Write the first turns of suites' prompts as conversations without answers; return the file."""
    path = folder / "questions.jsonl"
    sets = [load_suite(*one.split("=", 1), limit=limit) for one in suites]
    chats = [prompt.messages(prompt.turns[0]) for questions in sets for prompt in questions.prompts]
    records = [{"messages": [{"role": turn.role, "content": turn.content} for turn in chat]} for chat in chats]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Way:
    """One way to answer and label, and what its last round gave."""

    def __init__(self, config: DistillConfig, data: DataConfig, target: HFTarget, folder: Path) -> None:
        self.config, self.data, self.target, self.parent = config, data, target, folder
        self.name = str(config.engine)
        self.accelerator = Accelerator()
        self.num_rounds = 0
        self.answered: list[Example] = []
        self.shards: Sequence[ShardEntry] = []
        self.work_seconds: dict[str, list[float]] = {ANSWERS: [], LABELS: []}

    def answers(self) -> None:
        """Answer all questions, in a new folder."""
        self.num_rounds += 1
        self.answered = regenerate(self.config, self.data, self.target, self.folder(ANSWERS), self.accelerator)

    def labels(self) -> None:
        """Write labels and states of the last answers."""
        folder = self.folder(LABELS)
        manifest = distill(self.config, self.data, self.target, folder, self.accelerator, examples=self.answered)
        self.shards = manifest.shards
        for part, seconds in self.work_seconds.items():
            seconds.append(read_json(self.folder(part) / STATS_FILE)["process_seconds"])

    def folder(self, part: str) -> Path:
        """Return a part's folder in this round."""
        return self.parent / self.name / str(self.num_rounds) / part

    def examples(self) -> dict[str, DistilledExample]:
        """Return what the last round has stored, by id."""
        found = [example for entry in self.shards for example in read_shard(self.folder(LABELS), entry)]
        return {example.example.id: example for example in found}


def rows_of(ways: Sequence[Way], wall: Mapping[str, list[float]], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each part of each way, and for both parts together. The first way is the baseline."""
    equal = {
        ANSWERS: f"{found['equal_answers']} of {found['answers']}",
        LABELS: f"{found['equal_labels']} of {found['given_labels']} given, {found['labels']} in all",
    }
    differ = {LABELS: max((layer["largest"] for layer in found["states"].values()), default="-")}
    rows, baseline = [], dict[str, list[float]]()
    for way in ways:
        seconds = {part: wall[f"{way.name} {part}"] for part in (ANSWERS, LABELS)}
        work = {part: values[1:] for part, values in way.work_seconds.items()}  # the first round warms up
        for parts in (seconds, work):
            parts[BOTH] = [sum(pair) for pair in zip(parts[ANSWERS], parts[LABELS], strict=True)]
        is_baseline = not rows
        baseline = baseline or seconds
        rows += [
            {
                "way": way.name,
                "part": part,
                "seconds": median(seconds[part]),
                "work_seconds": median(work[part]),
                "share": ratio(seconds[part], seconds[BOTH])[0],
                f"over {ways[0].name}": ratio(baseline[part], seconds[part]),
                "equal": "-" if is_baseline else equal.get(part, "-"),
                "states_differ": "-" if is_baseline else differ.get(part, "-"),
            }
            for part in (ANSWERS, LABELS, BOTH)
        ]
    return rows


def compared(
    ours: Mapping[str, DistilledExample], theirs: Mapping[str, DistilledExample]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Count equal answers, and labels on these; return the counts, and the texts of these answers.

    `given_labels` are those of `theirs`: a label ends with the text, and where the target disagrees with the text.
    """
    pairs = [(mine, theirs[id]) for id, mine in ours.items() if id in theirs]
    equal = [(mine, other) for mine, other in pairs if torch.equal(mine.example.input_ids, other.example.input_ids)]
    found = {"answers": len(ours), "equal_answers": len(equal), "labels": 0, "given_labels": 0, "equal_labels": 0}
    if not equal:
        return found, []
    here, there = (torch.cat([example.continuations for example in examples]) for examples in zip(*equal, strict=True))
    known = there != UNKNOWN
    found["labels"], found["given_labels"] = int((here != UNKNOWN).sum()), int(known.sum())
    found["equal_labels"] = int((known & (here == there)).sum())
    return found, [mine.example.input_ids for mine, _ in equal]


def states_differ(config: DistillConfig, target: HFTarget, texts: Sequence[torch.Tensor]) -> dict[str, dict[str, float]]:
    """Return how much the servers' states of texts differ from the target's here, by layer."""
    sides = list[tuple[torch.Tensor, torch.Tensor]]()
    with ExitStack() as stack, torch.inference_mode():
        served = open_states(config, target, stack)
        names = ["last", *map(str, served.layers)]
        for text in texts:
            last, inputs = target.hidden_states(text[None].long(), served.layers)
            there, layers = served.read([text])
            sides.append((torch.cat([last, inputs], dim=-1)[0], torch.cat([there, *layers.values()], dim=-1)[0]))
    if not sides:
        return {}
    ours, theirs = (torch.cat(side).float().chunk(len(names), dim=-1) for side in zip(*sides, strict=True))
    return {name: difference(*pair) for name, *pair in zip(names, ours, theirs, strict=True)}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Return the largest relative differences of states [token, width]."""
    between = theirs - ours
    largest, of_a_token = between.abs().max() / ours.abs().max(), (between.norm(dim=-1) / ours.norm(dim=-1)).max()
    return {name: float(f"{float(value):.3g}") for name, value in (("largest", largest), ("of_a_token", of_a_token))}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers are then stopped, too
    typer.run(main)
