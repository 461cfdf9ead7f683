"""How a drafter is trained, and how a step's texts are divided among processes."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from ..data.config import LABELS
from ..data.fields import OPTIONS, NonNegativeInt, PositiveInt, Seed, Share, SmallCount, one_of, raise_problems
from ..models.drafters.losses import TEACHERS, WEIGHTS, LossKind

# Our name of a learning rate schedule, and transformers'.
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
TRACKERS = ("none", "wandb", "tensorboard", "wandb+tensorboard")

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "global_batch_size",  # it only decides gradient_accumulation
        "patience",
        "change_share",  # of what is learned, only this share is saved
        "activation_checkpointing",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "tracker",
    }
)
"""Options that don't change what is learned: a run may resume with other values."""


@dataclass(kw_only=True, config=OPTIONS)
class TrainConfig:
    """Training of one drafter on the shards, for a fixed number of optimizer steps."""

    steps: PositiveInt
    """Optimizer steps of the whole training. With more steps than before, a finished training
    resumes from its last checkpoint, on the schedule of the new number. Fewer steps than before are
    an error."""
    batch_size: SmallCount = 8
    """Texts per micro-batch and process. One optimizer step reads `batch_size` x
    `gradient_accumulation` x processes texts."""
    gradient_accumulation: SmallCount = 1
    """Micro-batches per process and optimizer step."""
    global_batch_size: SmallCount | None = None
    """Texts per optimizer step over all processes. `gradient_accumulation` follows from it, for any
    number of GPUs. It must be a multiple of `batch_size` x processes. null: `batch_size` x
    `gradient_accumulation` x processes."""
    max_positions: PositiveInt | None = None
    """Positions per micro-batch and process whose labels are trained on. They are drawn at random
    from the positions that have labels. null: all of them."""
    packing: bool = False
    """Put several texts of a micro-batch into one row, which saves padding. Texts in one row don't
    attend to each other. Each step has the same texts and the same loss as without packing, apart
    from rounding and from the random feature noise of the kind eagle."""
    activation_checkpointing: bool = False
    """Recompute the activations of the drafter's decoder layers in the backward pass, and don't
    store them: less memory, more time, and the same gradient. Only the kinds block, eagle,
    eagle3, mtp and draft_model have such layers; for other kinds it changes nothing."""
    labels: Annotated[str, one_of(*LABELS)] = "distilled"
    """What the drafter learns to predict: `distilled`, the target's own continuations, or `text`,
    the next tokens of the text at the same positions (for an ablation)."""

    loss: Annotated[LossKind, Field(strict=False)] = LossKind.cross_entropy
    """The loss. `cross_entropy` needs only the labels. `kl` and `kl_acceptance` compare the drafter
    with the target's distribution, at depths where the continuation equals the text. See `LossKind`."""
    teacher: Annotated[str, one_of(*TEACHERS)] = "full"
    """The target's distribution that all losses but `cross_entropy` use. `full` computes it from
    the target's hidden states. `top_k` uses the likeliest tokens that `distill.top_logprobs`
    stored, and counts all other tokens as one. See `Objective`."""
    label_weights: Annotated[str, one_of(*WEIGHTS)] = "uniform"
    """Weight of each label in the loss. `uniform`: all are equal, apart from a kind's own decay from
    depth to depth. `dpace`: the share of the expected accepted length that depends on the label
    (D-PACE, arXiv 2605.18810), in place of that decay."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    schedule: Annotated[str, one_of(*SCHEDULES)] = "cosine"
    """Learning rate after the warm-up: `cosine` or `linear` fall to 0 at the last step; `constant`
    stays at the peak."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps at the start in which the learning rate rises linearly from 0 to its peak."""
    lora_rank: PositiveInt | None = None
    """Train a change of this rank for each matrix of the drafter in `drafter.start_from` (LoRA, arXiv
    2106.09685), and vectors whole. The change is saved beside the whole drafter, in `drafter/low_rank`:
    a small file, which is a drafter by itself wherever a folder can be named. null: train all weights."""
    change_share: Share = 1.0
    """Share of the change from the drafter in `drafter.start_from` that is saved. 0.7 saves the weights at
    seven tenths of the way (WiSE-FT, arXiv 2109.01903): they gain a little less on the new texts, and lose
    less on others. Measurements in training are of the whole change. With another share, a finished training
    writes its drafter again from its last checkpoint, without training."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW for matrices. Vectors (biases and norms) have none."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of a step's gradient: a larger gradient is scaled down to it. null: no
    clipping."""

    validation_texts: NonNegativeInt = 0
    """Texts that are held out from training. To measure tokens per step, the target answers their
    prompts with the drafter, as in decoding. The drafter with the most tokens per step of all
    measurements is saved. 0: nothing is measured, and the last one is saved."""
    validation_tokens: PositiveInt = 128
    """Largest length in tokens of each answer to a held-out prompt."""
    validate_every: PositiveInt | None = None
    """Optimizer steps between two measurements on the held-out texts. null: one measurement, after
    the last step."""
    patience: PositiveInt | None = None
    """Early stopping: training ends after this many measurements in a row without more tokens per
    step than the best one before them. null: no early stopping."""

    seed: Seed = 0
    """Seed of the first weights, of the order of the texts and of the choice of positions."""
    shuffle_shards: PositiveInt = 16
    """Number of shards whose texts are shuffled together. Every process holds that many shards in
    memory."""

    log_every: PositiveInt = 10
    """Optimizer steps between two records in `metrics.jsonl`. A record covers all steps since the
    one before. Each record waits for the device, so a small number slows down training on a GPU."""
    checkpoint_every: PositiveInt = 100
    """Optimizer steps between two checkpoints. A killed run loses at most the steps since its last
    checkpoint. One more checkpoint is written after the last step."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints that are kept, the newest ones."""
    tracker: Annotated[str, one_of(*TRACKERS)] = "none"
    """Service that gets the records too: `wandb` (Weights & Biases, which reads the environment:
    WANDB_PROJECT, WANDB_MODE), `tensorboard` (event files in the run's folder), `wandb+tensorboard`,
    or `none`. `metrics.jsonl` has the records in any case."""

    @property
    def mixes_teacher_and_labels(self) -> bool:
        """Whether the loss learns from the target's distribution, and from labels off the text."""
        return self.loss.needs_teacher and self.labels == "distilled"

    def __post_init__(self) -> None:
        problems = []
        if self.global_batch_size is not None and self.gradient_accumulation != 1:
            problems.append(
                f"global_batch_size is {self.global_batch_size} and gradient_accumulation {self.gradient_accumulation}; the "
                "first decides the second: set gradient_accumulation to 1, or global_batch_size to null"
            )
        if self.warmup_steps >= self.steps:
            problems.append(
                f"warmup_steps is {self.warmup_steps}, not less than steps, which is {self.steps}; set train.warmup_steps=0 or "
                "below train.steps"
            )
        if self.validate_every is not None and not self.validation_texts:
            problems.append("validate_every is set, but validation_texts is 0; set that too")
        if self.patience is not None and self.validate_every is None:
            problems.append("patience is set, but validate_every is not, so training measures only once; set that too")
        raise_problems(problems)


# --- division of a batch over processes


DIVISION_KEYS = frozenset({"train.batch_size", "train.gradient_accumulation", "num_processes"})
"""The keys of a division in the description of a run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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
        values = {**run["train"], "num_processes": run["num_processes"]}
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

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


def for_launch(config: TrainConfig, launch: Mapping[str, Any], *, tensor_parallel: bool) -> TrainConfig:
    """Return the options of a training in such a launch: those of `with_accumulation`, with its errors.

    `launch` is that of `describe_launch`. Raises ValueError for a low-rank change whose state would be split, and for
    fewer held-out texts than processes that measure with them.
    """
    num_processes, sharded_by = launch["num_processes"], launch.get("sharding")
    if config.lora_rank is not None and sharded_by is not None:
        raise ValueError(
            f"train.lora_rank is set, and the launch splits the training's state by {sharded_by}; a low-rank change is small: "
            "use a launch that doesn't (conf/launch/one_node), or leave train.lora_rank out"
        )
    if 0 < (num_texts := config.validation_texts) < num_processes and not tensor_parallel:
        raise ValueError(f"train.validation_texts is {num_texts}, fewer than the {num_processes} processes; raise it")
    return with_accumulation(config, num_processes)


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
    return dataclasses.replace(config, global_batch_size=None, gradient_accumulation=texts // texts_at_once)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
