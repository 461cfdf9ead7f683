"""Configuration of a distillation."""

from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from ..data.config import FEATURES, STATE_DTYPES
from ..data.fields import OPTIONS, NonNegativeInt, PositiveInt, Seed, Share, SmallCount, different, one_of, raise_problems
from ..data.paths import repeated_names, split_name
from ..data.servers import NO_ADDRESS, is_address

REGENERATION_OPTIONS = (
    *("temperature", "top_k", "top_p", "max_new_tokens", "decode_batch_size", "drafter", "drafter_settings"),
    *("kv_budget_gib", "base_url", "states_dir"),
)
ENGINES = ("decoder", "batch", "openai", "vllm")
SERVERS = ("openai", "vllm")
"""Engines that are programs of their own."""
DECODER_ROWS = 16
"""Answers that the engine `decoder` decodes together by default."""


@dataclass(kw_only=True, config=ConfigDict(**OPTIONS, hide_input_in_errors=True))
class DistillConfig:
    """Options of labels, stored states and regenerated answers, and of the work's division."""

    horizon: SmallCount = 5
    """Number of tokens of the target's continuation that are labelled after every position."""

    label_temperature: NonNegativeFloat = 0.0
    """Temperature of the labels. 0 labels with the target's greedy continuations. Above 0 they are
    sampled from the target (ReDrafter, arXiv 2403.09919, equation 2), each token by a random number
    of `seed`, the example's id and the token's place. Losses that compare with the target's
    distribution need 1 or 0."""

    branches: bool = True
    """Whether a position is labelled beyond the first token where the target disagrees with the text.
    This takes further passes, which recurrent layers can't do. False ends such a label there: little is
    lost where the text is the target's own greedy answer (`engine`, or self-written data)."""

    features: Annotated[str, one_of(*FEATURES)] = "none"
    """`none` stores no hidden states, so training recomputes them. `last_hidden` stores the
    target's last ones, which all drafters except EAGLE-3, block drafters and draft models read."""

    feature_layers: Annotated[list[NonNegativeInt], AfterValidator(different)] = field(default_factory=list)
    """Layers of the target whose inputs are stored, as EAGLE-3 and block drafters read them
    (drafter.feature_layers). Training then needs no pass of the target."""

    features_dtype: Annotated[str, one_of(*STATE_DTYPES)] = "bfloat16"
    """Type of the stored states: `bfloat16`, or `float8_e4m3fn` or `int8` with a scale per token,
    at half the size."""

    top_logprobs: PositiveInt | None = None
    """Number of top tokens of the target stored with log-probabilities, at every position that may
    be trained. train.teacher=top_k learns from them. None stores none."""

    shard_examples: PositiveInt = 256
    """Examples per shard. An interruption loses at most one shard, and a kill two: a shard is written
    while the next one is labelled. Both are held in memory."""

    batch_tokens: PositiveInt = 8192
    """Tokens of text, padding included, in one forward pass; a longer text is alone in its pass.
    The KV cache of a batch is kept until all its labels are computed: lower this if memory runs
    out."""

    engine: Annotated[str, one_of(*ENGINES)] | None = None
    """Engine that regenerates: it first replaces all answers of the data by the target's. `decoder`
    is outrider's decode loop. `batch` is the same without drafters, in batches by predicted length
    within `kv_budget_gib`. `openai` is a server at `base_url`. `vllm` is one too, and it also gives
    the hidden states of the texts. None labels the data's own answers."""

    temperature: NonNegativeFloat = 0.0
    """Temperature of regenerated answers; 0 is greedy."""

    top_k: PositiveInt | None = None
    """Sample regenerated answers from the k most probable tokens only; None samples from all."""

    top_p: Share | None = None
    """Sample from the fewest tokens whose probabilities sum to top_p; None samples from all."""

    max_new_tokens: PositiveInt = 1024
    """Most tokens of a regenerated answer. `data.max_length` also bounds it, together with its
    prompt."""

    seed: Seed = 0
    """Seed of sampled answers and labels. Each answer has its own seed, a function of this one, the
    conversation's id and the turn."""

    decode_batch_size: SmallCount | None = None
    """Answers decoded in parallel: rows of a batch, or requests in flight of each process to each server. None is the engine's
    default."""

    drafter: str | None = None
    """Drafter that speeds up the engine `decoder`; the text doesn't change: a trained drafter's
    directory, prompt_lookup, suffix, recycling, or several joined by +."""

    drafter_settings: dict[str, Any] = field(default_factory=dict)
    """Runtime options of that drafter, as in `eval.settings`, such as {beam_width: 4, tree_nodes:
    5}."""

    kv_budget_gib: PositiveFloat = 4.0
    """Memory for a batch's KV cache and states of recurrent layers in the engine `batch`, in GiB;
    prefilling the prompts needs some more."""

    base_url: str | None = None
    """Address of the server for the engines `openai` and `vllm`, with its version:
    http://HOST:8000/v1. It must serve the target under `target.name_or_path`, or serve no other
    model. Several servers, joined by commas, share the work."""

    states_dir: str | None = None
    """Folder into which the engine `vllm` writes hidden states (its `shared_storage_path`), as it is
    called here. Files are deleted when they have been read."""

    def __post_init__(self) -> None:
        raise_problems(self._features_problems() + self._engine_problems() + self._server_problems() + self._idle_problems())

    @property
    def is_served(self) -> bool:
        """Whether another program regenerates."""
        return self.engine in SERVERS

    @property
    def decodes_branches(self) -> bool:
        """Whether continuations of positions are decoded beside the text. The states of a server allow none."""
        return self.branches and self.engine != "vllm"

    @property
    def is_greedy(self) -> bool:
        """Whether answers and labels are both the target's greedy ones, and so should agree."""
        return self.engine is not None and self.temperature == 0 and self.label_temperature == 0

    def _features_problems(self) -> list[str]:
        if self.features_dtype != "bfloat16" and self.features == "none" and not self.feature_layers:
            stored = f"features_dtype is {self.features_dtype}, and nothing is stored in it"
            return [f"{stored}; set features or feature_layers too"]
        return []

    def _idle_problems(self) -> list[str]:
        """Report regeneration options that have no effect, because nothing is regenerated."""
        if self.engine is not None:
            return []
        if idle := [name for name in REGENERATION_OPTIONS if getattr(self, name) != getattr(DEFAULTS, name)]:
            reason = "engine is null, which regenerates nothing, and options of regenerating are set"
            return [f"{reason}: {', '.join(idle)}; set engine to {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, or leave them out"]
        return []

    def _engine_problems(self) -> list[str]:
        problems = []
        if self.engine == "batch" and self.decode_batch_size is not None:
            problems.append(
                f"decode_batch_size is {self.decode_batch_size}, and the engine batch makes its batches as large as "
                "kv_budget_gib allows: set that, and leave decode_batch_size out"
            )
        if self.drafter is not None and self.engine not in (None, "decoder"):
            problems.append(
                f"drafter is {self.drafter!r} and engine {self.engine!r}; only the engine decoder uses one: set engine to "
                "decoder, or leave the drafter out"
            )
        if self.drafter is not None and (twice := repeated_names(split_name(self.drafter))):
            problems.append(f"drafter is {self.drafter!r}, which has {', '.join(twice)} twice; give each part once")
        if self.drafter_settings and self.drafter is None:
            problems.append("drafter_settings are set, and no drafter; set drafter too")
        return problems

    def _server_problems(self) -> list[str]:
        problems = []
        if self.is_served:
            if self.base_url is None:
                problems.append(
                    f"engine is {self.engine!r} and base_url is missing; set the server's address, such as http://HOST:8000/v1"
                )
        elif self.base_url is not None and self.engine is not None:
            problems.append(f"base_url belongs to the engines openai and vllm, and engine is {self.engine!r}; leave it out")
        if self.base_url is not None and not all(map(is_address, self.base_url.split(","))):
            problems.append(f"base_url {NO_ADDRESS}")
        if (self.engine == "vllm") != (self.states_dir is not None):
            problems.append(
                f"states_dir is {self.states_dir} and engine {self.engine}; the engine vllm needs the folder that it writes "
                "hidden states into, and no other engine does"
            )
        if self.engine == "vllm" and (self.temperature or self.label_temperature):
            problems.append(
                "engine is 'vllm', whose texts are their own labels, so both temperature and label_temperature must be 0; set "
                "engine to openai for sampled answers"
            )
        return problems


DEFAULTS = DistillConfig(engine="decoder")
