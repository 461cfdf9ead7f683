"""How a drafter is trained."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from ..data.choices import LABELS
from ..data.fields import OPTIONS, NonNegativeInt, PositiveInt, Seed, one_of, raise_problems
from ..models.drafters.losses import TEACHERS, WEIGHTS, LossKind

# Our name of a learning rate schedule, and transformers'.
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
TRACKERS = ("none", "wandb", "tensorboard", "wandb+tensorboard")
WANDB_MODES = ("online", "offline", "disabled")
EXPORTS = ("best", "last")
ON_SPIKE = ("warn", "stop")

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "global_batch_size",  # it only decides gradient_accumulation
        "patience",
        "export",
        "num_threads",
        "activation_checkpointing",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "checkpoint_in_background",
        "spike_threshold",
        "on_spike",
        "tracker",
        "wandb_mode",
        "project",
    }
)
"""Options that don't change what is learned, so a run may go on with other ones."""


@dataclass(kw_only=True, config=OPTIONS)
class TrainConfig:
    """Training of one drafter: a fixed number of optimizer steps over the shards, as many epochs as that takes."""

    steps: PositiveInt
    """Optimizer steps of the whole training. With more steps than before, a finished training resumes from its last
    checkpoint, on the schedule of the new number; with fewer it is an error."""
    batch_size: PositiveInt = 8
    """Texts per micro batch and process. One step reads batch_size x gradient_accumulation x processes texts."""
    gradient_accumulation: PositiveInt = 1
    """Micro batches per process and optimizer step."""
    global_batch_size: PositiveInt | None = None
    """Texts per optimizer step over all processes; `gradient_accumulation` follows from it, for any number of GPUs. It must
    be a multiple of `batch_size` x processes. null: `batch_size` x `gradient_accumulation` x processes."""
    max_positions: PositiveInt | None = None
    """Positions trained on per micro batch, drawn at random from its labelled ones; None trains on all of them."""
    packing: bool = False
    """Put several texts of a micro batch into one row, so that less of it is padding; they don't see each other. The same texts
    make a step, and the loss is the same but for rounding (and EAGLE-1's feature noise, which is drawn by place)."""
    activation_checkpointing: bool = False
    """Recompute what goes on inside the drafter's decoder layers for the gradient in place of keeping it: the same gradient (on
    a CPU the same bits) in less memory and more time. For EAGLE and draft models; the other kinds have no such layers."""
    labels: Annotated[str, one_of(*LABELS)] = "distilled"
    """`distilled`: the target's own continuations; `text`: the text's next tokens, at the same positions (an ablation)."""

    loss: Annotated[LossKind, Field(strict=False)] = LossKind.cross_entropy
    """`cross_entropy` on the labels; `kl`, `reverse_kl`, `tv`, `acceptance`, `kl_tv` or `kl_acceptance` against the target's
    distribution, where a continuation keeps to the text (see `LossKind`)."""
    teacher: Annotated[str, one_of(*TEACHERS)] = "full"
    """The target's distribution, for all losses but cross-entropy: `full`, of its hidden states, or `top_k`, of the likeliest
    tokens that distill.top_logprobs stored, and all others as one (see `Objective`)."""
    label_weights: Annotated[str, one_of(*WEIGHTS)] = "uniform"
    """`uniform`, or `reached`: a label counts only where the drafter was right at all depths before it."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    schedule: Annotated[str, one_of(*SCHEDULES)] = "cosine"
    """What follows the warm-up: `cosine` or `linear` (both end at 0), or `constant`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decay of the matrices; vectors (biases, norms) are never decayed."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients of a larger norm are scaled down to it; None leaves them as they are."""

    validation_texts: NonNegativeInt = 0
    """Texts left out of training, whose prompts the target answers with the drafter: so many tokens does decoding really accept
    per step. 0 measures nothing."""
    validation_tokens: PositiveInt = 128
    """Tokens of each such answer, at most."""
    validate_every: PositiveInt | None = None
    """Steps between two such measurements; None makes one, at the end."""
    patience: PositiveInt | None = None
    """Training ends early where so many measurements in a row were no better than the best one before them; None never does."""
    export: Annotated[str, one_of(*EXPORTS)] = "best"
    """The drafter that the run leaves: `best`, that of the highest measured tokens per step (kept in `best/` meanwhile), or
    `last`. It is the best one because that is what was measured, and after an early end the last one is past its peak. They are
    one and the same where nothing, or only the end, is measured."""

    seed: Seed = 0
    """Draws the first weights, the order of the texts and the positions trained on."""
    shuffle_shards: PositiveInt = 16
    """Shards whose texts are mixed with each other. That many are held in memory at a time, by every process."""
    num_threads: PositiveInt | None = None
    """torch's CPU threads per process; None leaves torch's own choice."""

    log_every: PositiveInt = 10
    """Steps between two records; only then (and at checkpoints) does the host wait for the device."""
    checkpoint_every: PositiveInt = 100
    """Steps between two checkpoints: what a killed run loses at most. One more is written at the end."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that are kept."""
    checkpoint_in_background: bool = True
    """Training waits only for a copy of the state (once more the memory of weights and optimizer, on the host), and a thread
    writes that. False writes at once, as DeepSpeed and FSDP do in any case."""
    spike_threshold: PositiveFloat | None = 10.0
    """A step's loss above the median of the last ones by more than so many of their deviations is a spike (see `SpikeWatch`),
    which is told with the ids of its texts; None looks for none."""
    on_spike: Annotated[str, one_of(*ON_SPIKE)] = "warn"
    """`warn` goes on; `stop` ends the training, with the last checkpoint before the spike kept."""

    tracker: Annotated[str, one_of(*TRACKERS)] = "none"
    """`wandb` sends the records to Weights & Biases too, `tensorboard` to event files in the run's folder, `wandb+tensorboard`
    to both; they always go to `metrics.jsonl`."""
    wandb_mode: Annotated[str, one_of(*WANDB_MODES)] = "online"
    """`online`, `offline` (kept in the run's folder, for `wandb sync`) or `disabled`."""
    project: str = "outrider"
    """Project at Weights & Biases."""

    def __post_init__(self) -> None:
        problems = []
        if self.global_batch_size is not None and self.gradient_accumulation != 1:
            problems.append(
                f"global_batch_size is {self.global_batch_size} and gradient_accumulation {self.gradient_accumulation}; the "
                "first decides the second: set gradient_accumulation to 1, or global_batch_size to null"
            )
        if self.warmup_steps >= self.steps:
            problems.append(f"warmup_steps is {self.warmup_steps}, not less than steps, which is {self.steps}")
        if self.validate_every is not None and not self.validation_texts:
            problems.append("validate_every is set, but validation_texts is 0; set that too")
        if self.patience is not None and self.validate_every is None:
            problems.append("patience is set, but validate_every is not, so there is nothing to wait for; set that too")
        raise_problems(problems)
