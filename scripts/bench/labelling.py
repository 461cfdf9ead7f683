"""Measures distillation: the labels of every position, against a prefill and transformers' `generate`.

    python scripts/bench/labelling.py
    python scripts/bench/labelling.py --target meta-llama/Llama-3.2-1B --dtype bfloat16

Four methods take turns on the same texts:

- `prefill`: a forward pass of all texts in the same batches, with the first token after each position.
- `label_continuations`: the target's next `--horizon` tokens after every position.
- `label_continuations, packed`: the same with packed linear layers where they are faster, as labelling has them.
- `generate`: the same labels by transformers, for a sample of the positions, since all would take
  long. Each position has its own prefix, padded on the left, beside prefixes of like length.

The labels of the sample are compared. A difference is printed with the distance of both tokens in
plain logits, and ends the command with status 1: above rounding errors, it is a fault.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import finish, median, ratio, take_turns
from torch.nn.utils.rnn import pad_sequence

from outrider.data.stdlib import read_source, stdlib_files
from outrider.data.types import UNKNOWN
from outrider.distill.label.continuations import label_continuations
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

PREFILL, LABEL, PACKED, GENERATE = "prefill", "label_continuations", "label_continuations, packed", "generate"
HEAD_ROWS = 2048
"""Positions whose logits are in memory at a time."""


def main(
    target: Annotated[str, typer.Option(help="Folder or Hub id.")] = "models/demo_target",
    dtype: str = "float32",
    texts: int = 32,
    seq: Annotated[int, typer.Option(help="Tokens of a text.")] = 512,
    batch_size: int = 8,
    horizon: Annotated[int, typer.Option(help="Tokens labelled after every position.")] = 5,
    sample: Annotated[int, typer.Option(help="Positions that `generate` continues.")] = 128,
    rounds: int = 5,
    threads: int = 1,
    output: Path = Path("outputs/bench/labelling.json"),
) -> None:
    """Measure distillation."""
    options = dict(locals())
    torch.set_num_threads(threads)
    loaded = load_target(TargetConfig(name_or_path=target, dtype=dtype))
    bench = Bench(loaded, texts_of(loaded, texts, seq), batch_size, horizon, sample)
    # 1. The methods in turns.
    ways = {PREFILL: bench.prefill, LABEL: bench.label, PACKED: bench.label_packed, GENERATE: bench.generate}
    seconds = take_turns(ways, rounds=rounds, device=loaded.device)
    # 2. The table.
    num_positions, agreement = bench.num_positions, bench.num_agreeing / bench.num_positions
    rows = []
    for name, each in seconds.items():
        count = len(bench.prefixes) if name == GENERATE else num_positions
        rows.append(
            {
                "method": name,
                "positions": count,
                "positions_per_second": median([count / spent for spent in each.wall]),
                "positions_per_processor_second": median([count / spent for spent in each.processor]),
                "prefills": None if name == GENERATE else ratio(each.processor, seconds[PREFILL].processor),
            }
        )
    differences = bench.differences()
    expected = 1 + (1 - agreement) * (horizon - 1)
    facts: dict[str, Any] = {"agreement": agreement, "expected_prefills": expected, "differences": differences}
    finish(output, rows, options, device=loaded.device, **facts)
    print(f"The target agrees at {agreement:.2f} of the positions: {expected:.2f} prefills are expected")
    for difference in differences:
        print(f"another label: {difference}")
    raise typer.Exit(int(bool(differences)))


def texts_of(target: HFTarget, count: int, seq: int) -> torch.Tensor:
    """Return so many texts of the standard library [text, seq]."""
    ids: list[int] = []
    for path in stdlib_files("distill"):
        ids += target.tokenizer(read_source(path) or "", add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= count * seq:
            break
    return torch.tensor(ids[: len(ids) // seq * seq]).view(-1, seq)[:count].to(target.device)


class Bench:
    """The methods, with their texts and their last labels."""

    def __init__(self, target: HFTarget, texts: torch.Tensor, batch_size: int, horizon: int, sample: int) -> None:
        self.target, self.texts, self.batch_size, self.horizon = target, texts, batch_size, horizon
        # The last position has no next token that the target could agree with.
        positions = torch.cartesian_prod(torch.arange(len(texts)), torch.arange(texts.shape[1] - 1))
        chosen = positions[torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))[:sample]]
        self.sample = chosen[chosen[:, 1].argsort()]  # prefixes of like length follow each other
        self.prefixes = [texts[row, : position + 1] for row, position in self.sample.tolist()]
        self.num_positions = self.num_agreeing = 0
        self.labels = self.generated = torch.empty(0)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Compute the first token after each position."""
        for batch in self.texts.split(self.batch_size):
            states = self.target.model.base_model(input_ids=batch, use_cache=False).last_hidden_state
            for part in states.flatten(0, 1).split(HEAD_ROWS):
                self.target.head(part).argmax(-1)

    def label(self) -> None:
        """Label every position but the last of each text."""
        labels, counts = [], []
        for batch in self.texts.split(self.batch_size):
            everywhere = torch.ones_like(batch, dtype=torch.bool)
            wanted = everywhere.clone()
            wanted[:, -1] = False
            continuations, _, stats = label_continuations(self.target, batch, everywhere, wanted, horizon=self.horizon)
            labels.append(continuations)
            counts.append((stats.num_positions, stats.num_agreeing))
        self.labels = torch.cat(labels)
        self.num_positions, self.num_agreeing = map(sum, zip(*counts, strict=True))

    def label_packed(self) -> None:
        """Do the same with packed linear layers, where they are faster."""
        with self.target.packed_where_faster():
            self.label()

    @torch.inference_mode()
    def generate(self) -> None:
        """Continue the sampled prefixes; nothing follows a stop token."""
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        stop_ids = torch.tensor(self.target.stop_ids, dtype=torch.long, device=self.texts.device)
        generated = []
        for start in range(0, len(self.prefixes), 32):
            prefixes = self.prefixes[start : start + 32]
            ids, mask = pad(prefixes), pad([torch.ones_like(prefix) for prefix in prefixes])
            options = {"max_new_tokens": self.horizon, "do_sample": False, "pad_token_id": 0}
            new = self.target.model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
            new = torch.nn.functional.pad(new, (0, self.horizon - new.shape[1]), value=UNKNOWN)
            stops = torch.isin(new, stop_ids)
            generated.append(new.masked_fill(stops.cumsum(1) - stops.long() > 0, UNKNOWN))
        self.generated = torch.cat(generated)

    @torch.inference_mode()
    def differences(self) -> list[dict[str, Any]]:
        """Return the first label of the sample's positions that differs, with the distance in plain logits."""
        found = []
        labels = self.labels[self.sample[:, 0], self.sample[:, 1]]
        for index in (labels != self.generated).any(1).nonzero()[:, 0].tolist():
            depth = int((labels[index] != self.generated[index]).nonzero()[0])
            ours, theirs = int(labels[index, depth]), int(self.generated[index, depth])
            text = torch.cat([self.prefixes[index], labels[index, :depth]])[None]
            logits = self.target.model(text, use_cache=False).logits[0, -1]
            distance = (logits[ours] - logits[theirs]).item()
            found.append(
                {"prefix_tokens": text.shape[1] - depth, "depth": depth, "ours": ours, "theirs": theirs, "by": distance}
            )
        return found


if __name__ == "__main__":
    typer.run(main)
