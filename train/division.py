"""Division of a step's texts among processes and micro-batches, also of a resumed run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .config import TrainConfig

DIVISION_KEYS = frozenset({"train.batch_size", "train.gradient_accumulation", "num_processes"})
"""The keys of a division in the description of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of a step's texts.

    Each process reads `gradient_accumulation` micro-batches of `batch_size` texts.
    """

    batch_size: int
    gradient_accumulation: int
    num_processes: int

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> "Division":
        """The division of a described run."""
        train = run["train"]
        return cls(
            batch_size=train["batch_size"],
            gradient_accumulation=train["gradient_accumulation"],
            num_processes=run["num_processes"],
        )

    @property
    def texts_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation * self.num_processes

    def may_follow(self, before: "Division") -> bool:
        """Whether a run may resume with this division after `before`.

        It may with as many texts in every step, or with another number of processes.
        """
        return self.texts_per_step == before.texts_per_step or self.num_processes != before.num_processes

    def __str__(self) -> str:
        """Return the factors of the texts per step, by their options."""
        return (
            f"{_processes(self.num_processes)} x gradient_accumulation {self.gradient_accumulation} x batch_size "
            f"{self.batch_size}"
        )


def with_accumulation(config: TrainConfig, num_processes: int) -> TrainConfig:
    """Return the options with the `gradient_accumulation` that `global_batch_size` asks for.

    Without a `global_batch_size` the options stay as they are. Raises ValueError where the texts of
    a step can't be divided evenly.
    """
    texts = config.global_batch_size
    if texts is None:
        return config
    texts_at_once = config.batch_size * num_processes
    if texts % texts_at_once:
        smaller = texts // texts_at_once * texts_at_once
        nearest = " or ".join(str(size) for size in (smaller, smaller + texts_at_once) if size)
        sizes = [size for size in range(1, config.batch_size) if texts % (size * num_processes) == 0]
        remedy = f", or train.batch_size={sizes[-1]}" if sizes else ""
        raise ValueError(
            f"train.global_batch_size is {texts}, which is not a multiple of {texts_at_once} (train.batch_size "
            f"{config.batch_size} x {_processes(num_processes)}); set train.global_batch_size={nearest}{remedy}"
        )
    return replace(config, global_batch_size=None, gradient_accumulation=texts // texts_at_once)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def describe_change(before: Division, now: Division, *, step: int, position: int, num_texts: int, steps_left: int) -> str:
    """Describe what changes for a run that resumes after `step` at text `position`.

    Positions count from 0 through all epochs.
    """
    if now.texts_per_step == before.texts_per_step:
        order = f"every step still reads the same {now.texts_per_step} texts"
    else:
        order = (
            f"a step reads {now.texts_per_step} texts and no longer {before.texts_per_step}; the order stays, from text "
            f"{position % num_texts + 1} of epoch {position // num_texts + 1} on, and the {steps_left} steps left read "
            f"{steps_left * now.texts_per_step} texts and not {steps_left * before.texts_per_step}, at unchanged learning rates"
        )
    return (
        f"after step {step} the run resumes with {now}, where it was {before}: {order}. Random numbers (dropout, the positions "
        "that train.max_positions draws) and the order of sums differ from here on, so the run isn't equal bit for bit"
    )
