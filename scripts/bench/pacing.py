"""Speed of paced merges on held-out texts, with the seconds of drafts and passes given.

    python scripts/bench/pacing.py --target TARGET --shards RUN/distill --validated RUN/variants/NAME \
        suffix RUN/variants/NAME/drafter+suffix --output FILE

Pacing depends on measured times, and so do its figures, more than on anything that a change of its rules
may gain. Here a pass over a tree of n nodes takes 1 + SLOPE * n, a draft of a trained drafter DRAFT (times of
a plain pass), and suffix a thousandth. As in `replay`, the texts are the target's own greedy answers: what
the target would choose and its last hidden states are read from the labels. So thousands of steps take seconds,
and a figure is the same on every machine.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from replay import read_batch
from report import finish

from outrider.data.files import read_json
from outrider.data.manifest import Manifest
from outrider.data.shards import label_store
from outrider.models.decoding import GreedyAcceptance, Prompts, generate
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import AcceptedPath, TargetOutput
from outrider.models.drafters import load_drafter
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.drafters.merge_sources import MergedDraft, MergeSources
from outrider.models.drafters.merged import MergedDrafter
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.validation import hold_out

SUFFIX = 0.001
"""Time of a draft without a model, in plain passes."""


class Clock:
    """Clock that only drafts and passes move, in plain passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ReplayedTarget:
    """A target that chooses the tokens of one known text, on a clock."""

    has_fixed_shapes = False

    def __init__(self, target: HFTarget, clock: Clock, slope: float) -> None:
        self.vocab_size, self.context_length, self.clock, self.slope = target.vocab_size, target.context_length, clock, slope
        self.num_prefills = 0

    def begin(self, tokens: list[int], hidden_states: torch.Tensor) -> None:
        """Choose the tokens of this text next."""
        self.tokens, self.hidden_states, self.last = tokens, hidden_states, 0

    def prefill(self, prompts: Prompts, **_: Any) -> TargetOutput:
        self.num_prefills += 1
        self.last = prompts.lengths[0]  # the place of the first token of the answer
        output = self._output(range(self.last))
        return TargetOutput(logits=output.logits[:, -1:], hidden_states=output.hidden_states)

    def verify(self, last_token: torch.Tensor, tree: DraftTree, **_: Any) -> TargetOutput:
        self.clock.now += 1.0 + self.slope * tree.num_nodes
        places: list[int | None] = [self.last]
        for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
            above = places[parent + 1]
            is_right = above is not None and self.tokens[above + 1 : above + 2] == [token]
            places.append(above + 1 if above is not None and is_right else None)
        return self._output(places)

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        self.last += len(accepted.new_tokens[0])

    def select(self, rows: Any) -> None:
        """Do nothing: there is one row."""

    def _output(self, places: Any) -> TargetOutput:
        """Return logits that choose the next token of the text, and states, where a place is known."""
        logits = torch.zeros(1, len(places), self.vocab_size)
        states = torch.zeros(1, len(places), self.hidden_states.shape[1])
        for entry, place in enumerate(places):
            if place is not None:
                logits[0, entry, self.tokens[min(place + 1, len(self.tokens) - 1)]] = 1.0
                states[0, entry] = self.hidden_states[min(place, len(self.hidden_states) - 1)]
        return TargetOutput(logits=logits, hidden_states=states)


class TimedSources(MergeSources):
    """Sources that take given times."""

    def on(self, clock: Clock, seconds: float) -> "TimedSources":
        self.clock, self.seconds, self.num_asked = clock, seconds, [0] * len(self.named)
        return self

    def ask(self, draft: MergedDraft, index: int) -> None:
        self.num_asked[index] += 1
        self.clock.now += self.seconds if isinstance(self.sources[index], TrainableDrafter) else SUFFIX
        super().ask(draft, index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="suffix, trained drafters that read the last state only, or merges of both")
    parser.add_argument("--target", required=True)
    parser.add_argument("--shards", type=Path, required=True, help="the labels, in the folder distill of the run")
    parser.add_argument("--validated", type=Path, required=True, help="folder of the variant whose held-out texts are used")
    parser.add_argument("--slope", type=float, default=0.055, help="time of a further node, in plain passes")
    parser.add_argument("--draft", type=float, default=0.25, help="time of a trained drafter's draft, in plain passes")
    parser.add_argument("--output", type=Path, required=True, help="the record, in JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, manifest = load_target(args.target, torch.device("cpu")), label_store(args.shards).load()
    texts = held_out_texts(args.validated, args.shards, manifest, target)
    rows = [row_of(name, target, texts, args.slope, args.draft) for name in args.drafters]
    finish(args.output, rows, vars(args))


def held_out_texts(
    validated: Path, shards: Path, manifest: Manifest, target: HFTarget
) -> list[tuple[list[int], int, torch.Tensor]]:
    """Return the tokens, the prompt's length, and the last hidden states of each text."""
    train = read_json(validated / "train" / "summary.json")["run"]["train"]
    room = target.context_length - train["validation_tokens"]
    drafter = load_drafter(validated / "drafter", target)
    assert isinstance(drafter, TrainableDrafter)
    texts = []
    for text in hold_out(shards, manifest, train["validation_texts"], seed=train["seed"], max_prompt_tokens=room):
        batch = read_batch(drafter, target, shards, manifest, *text.location)
        assert batch.hidden_states is not None
        first = int(batch.positions[0].nonzero()[0, 0])
        texts.append((batch.input_ids[0].tolist(), first + 1, batch.hidden_states[0].float()))
    return texts


def row_of(
    name: str, target: HFTarget, texts: list[tuple[list[int], int, torch.Tensor]], slope: float, draft: float
) -> dict[str, Any]:
    """Decode all texts, one after the other, and return the figures."""
    clock = Clock()
    drafter = load_drafter(name, target, pace="expected")
    assert isinstance(drafter, MergedDrafter)
    drafter.clock = clock
    drafter.merge = timed = TimedSources(drafter.sources, max_nodes=drafter.max_nodes, grows=True).on(clock, draft)
    replayed = ReplayedTarget(target, clock, slope)
    tokens = steps = nodes = 0
    for text, length, states in texts:
        replayed.begin(text, states)
        prompt, left = torch.tensor(text[:length]), len(text) - length
        answer = generate(replayed, drafter, GreedyAcceptance(), [prompt], max_new_tokens=left)
        first, *after = answer  # the prefill's token takes no step
        assert [token for step in (first, *after) for token in step.tokens[0]] == text[length:], "another text was decoded"
        tokens, steps = tokens + sum(len(step.tokens[0]) for step in after), steps + len(after)
        nodes += sum(step.num_nodes for step in after)
    row = {
        "drafter": "+".join(Path(part).parent.name if "/" in part else part for part in name.split("+")),
        "speedup": round(tokens / clock.now, 3),
        "tokens per step": round(tokens / steps, 3),
        "nodes per step": round(nodes / steps, 1),
        "asked": dict(zip(drafter.sources, (round(count / steps, 2) for count in timed.num_asked), strict=True)),
        "steps": steps,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
