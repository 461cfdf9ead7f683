"""Options of the drafters that are trained, by kind. Importing this module loads no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, Distinct, NonNegativeInt, PositiveInt, one_of, raise_problems
from .shared_options import LayerOptions, TreeOptions, check_form, search_problems

MAX_RANK = 2**13
MAX_PAIRS = 2**22
"""Most pairs of candidates in neighbouring slots: 16 MiB of logits for each row of a batch."""
MAX_TREE_NODES = 2**12
"""Far more than any target gains from."""


@dataclass(kw_only=True, config=OPTIONS)
class RedrafterConfig:
    """Options of a ReDrafter: its shape, and how it drafts by default."""

    initial_state: Annotated[str, one_of("embedding", "zero")] = "embedding"
    """`embedding`: s_1 = e_1, as in the paper. `zero`: s_0 = 0 and s_1 = f(W e_1 + b), as in
    Apple's release."""
    num_blocks: NonNegativeInt = 2
    """Residual blocks between [h ; s] and the head."""
    exit_width: PositiveInt | None = None
    """Width of the blocks and of the head's input; None is twice the target's hidden size. A
    smaller width makes a cheaper head."""
    head_init: Annotated[str, one_of("random", "target")] = "random"
    """`random`, or `target`: start with the target's head; `exit_width` must then be the target's
    hidden size."""
    draft_vocab_size: PositiveInt | None = None
    """Size of a reduced draft vocabulary, which has the most frequent tokens of the distilled data.
    None is the whole vocabulary."""
    beam_width: PositiveInt = 4
    """Beams of the beam search. May be changed when the drafter is loaded."""
    beam_length: PositiveInt = 5
    """Draft tokens per beam, without the token that the target has already chosen. May be changed
    when it is loaded."""
    top_k: PositiveInt | None = None
    """Tokens that each beam may continue with: only the `top_k` most probable ones, whose
    probabilities then sum to 1. None is all tokens, the paper's search. Apple's release keeps 50. May
    be changed when the drafter is loaded."""

    tree_nodes: PositiveInt | None = None
    """Nodes of the draft tree: the most probable nodes of the beam search. None is the paper's
    tree, the final beams. May be changed when the drafter is loaded."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"beam_width", "beam_length", "top_k", "tree_nodes"})

    def __post_init__(self) -> None:
        num_nodes = self.beam_width * self.beam_length
        options = f"beam_width is {self.beam_width} and beam_length {self.beam_length}"
        raise_problems(search_problems(options, num_nodes, num_nodes * self.beam_width))


@dataclass(kw_only=True, config=OPTIONS)
class MedusaConfig:
    """Options of Medusa: the heads, their training, and the draft tree."""

    num_heads: PositiveInt = 4
    """Number of heads, which is the longest path of a draft tree. Distil with a horizon of at least
    one more."""
    num_layers: PositiveInt = 1
    """Residual blocks x + SiLU(Linear(x)) of each head, which start as the identity."""
    share_head: bool = False
    """Use the target's output layer for all heads, frozen and not saved. Off, each head has an
    output layer that starts as a copy of the target's."""
    head_rank: PositiveInt | None = None
    """Rank of one trained output layer that all heads share; it starts as the best approximation of
    the target's. None: no shared layer."""
    tree_nodes: Annotated[int, Field(ge=1, le=MAX_TREE_NODES)] = 24
    """Nodes of the draft tree, chosen by how often each head was right at each rank at the end of
    training. May be changed when the drafter is loaded."""
    tree_paths: Annotated[list[Annotated[list[NonNegativeInt], Field(min_length=1)]], Field(min_length=1)] | None = None
    """The draft tree as paths of ranks, such as [[0], [1], [0, 0]]; it overrides `tree_nodes`. None
    is the chosen tree. May be changed when the drafter is loaded."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"tree_nodes", "tree_paths"})

    def __post_init__(self) -> None:
        problems = []
        if self.share_head and self.head_rank is not None:
            problems.append("share_head leaves no head for head_rank to factorise; leave one of them out")
        paths = self.tree_paths or []
        for index, path in enumerate(paths):
            if len(path) > self.num_heads:
                problems.append(f"tree_paths has {path}, which has more ranks than the {self.num_heads} heads; shorten it")
            elif path in paths[:index]:
                problems.append(f"tree_paths has {path} twice; list each path once")
            elif len(path) > 1 and path[:-1] not in paths:
                problems.append(f"tree_paths has {path} but not its parent {path[:-1]}; add the parent")
        raise_problems(problems)


@dataclass(kw_only=True, config=OPTIONS)
class EagleConfig(LayerOptions):
    """Options of an EAGLE drafter: EAGLE-1's training, and how it drafts EAGLE-2's tree by default."""

    bias: bool = False
    """Whether `fc` has a bias."""
    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: the layer starts with the weights of the target's last layer, but its output
    projections start at zero, so the feature passes through unchanged. `random`: random weights, as
    in the paper."""
    feature_noise: NonNegativeFloat = 0.1
    """Largest uniform noise added to the features in training (EAGLE-1, section 3.2)."""


@dataclass(kw_only=True, config=OPTIONS)
class Eagle3Config(LayerOptions):
    """Options of an EAGLE-3 drafter: its shape, its training, and how it drafts by default."""

    feature_layers: Distinct[NonNegativeInt] | None = None
    """Layers of the target whose inputs the drafter reads. None: an early, a middle and a late
    layer, with the numbers 2, half of the number of layers, and the last but two (fewer if these
    coincide)."""
    draft_vocab_size: PositiveInt | None = None
    """Size of a reduced draft vocabulary, which has the most frequent tokens of the distilled data.
    None is the whole vocabulary."""
    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: layer, norm and head start with the weights of the target's last ones, but the
    layer's output projections start at zero, so the latest feature passes through unchanged.
    `random`: random weights, as in the paper."""
    fc_norm: bool = False
    """Whether each layer's features are normed before `fc` (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Whether the features of all layers are normed as one vector before `fc`, as speculators 0.9
    does by default. Not together with `fc_norm`."""
    norm_output: bool = False
    """Whether deeper steps read the layer's output after the final norm (EAGLE-3.1). False: before
    it, as in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are both true; set one of them to false")


@dataclass(kw_only=True, config=OPTIONS)
class MtpConfig(TreeOptions):
    """Options of an MTP head: where its weights come from, and how it drafts by default."""

    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: the head starts with the weights of the one in the target's checkpoint. `random`: random
    weights, also for a target without such a head."""
    norm_output: bool = True
    """Whether deeper steps read the layer's output after its final norm, as in transformers, and in vLLM's
    Qwen3-Next and Qwen3.5. False: before it, as in vLLM's DeepSeek-V3 and GLM-4."""


@dataclass(kw_only=True, config=OPTIONS)
class DraftModelConfig:
    """Options of an independent draft model, and how it drafts by default."""

    path: str | None = None
    """Directory or Hub id of a model to fine-tune, or None for a model of the target's family with
    the sizes below. It needs safetensors weights, and the target's tokenizer (which is loaded with
    `target.tokenizer_options`) and vocabulary size."""
    init: Annotated[str, one_of("random", "target_layers")] = "random"
    """`random`, or `target_layers`: copy the target's first layers, embeddings, norm and head. Then
    only `num_layers` may be chosen."""
    num_layers: PositiveInt = 2
    """Decoder layers, at most the target's number."""
    hidden_size: PositiveInt | None = None
    """Hidden size; None is the target's. The other widths and the heads keep the target's ratios."""
    architecture: dict[str, Any] | None = None
    """transformers' configuration of the model, which a saved drafter has. It replaces the options
    above, and no recipe needs it."""

    length: PositiveInt = 4
    """Number of draft tokens on the longest path. This and the next options may be changed when the
    drafter is loaded."""
    top_k: PositiveInt = 1
    """Nodes expanded at each depth; 1 gives a chain."""
    tree_nodes: PositiveInt | None = None
    """Nodes of the tree: the most probable nodes of the search; None keeps all."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"length", "top_k", "tree_nodes"})

    def __post_init__(self) -> None:
        problems = search_problems(f"length is {self.length} and top_k {self.top_k}", self.length * self.top_k**2)
        if self.init == "target_layers" and self.hidden_size:
            problems.append("init is target_layers, so hidden_size can't be chosen; leave that out, or set random")
        raise_problems(problems)


@dataclass(kw_only=True, config=OPTIONS)
class BlockConfig:
    """Options of a block drafter: its shape, its training, and how it drafts by default."""

    layer: Annotated[dict[str, Any], AfterValidator(check_form)] | None = None
    """Form of the decoder layers; None is the target's kind. See the same option of EAGLE-3."""
    num_layers: PositiveInt = 1
    """Number of decoder layers. The released drafters of 8B targets have 5."""
    feature_layers: Distinct[NonNegativeInt] | None = None
    """Layers of the target whose inputs the drafter reads. None: five layers evenly spread from
    layer 2 to the last but two, or EAGLE-3's three in targets of fewer than twelve layers."""
    block: PositiveInt = 4
    """Draft tokens on the longest path, all from one pass."""
    num_slots: PositiveInt | None = None
    """Slots that the layers read. None: one for each draft token. With fewer, the last slot's output
    also serves the draft tokens after it, which then differ by the correction only. With one slot,
    all draft tokens share its output, as ReDrafter's share the target's state. Labels must be at
    least one token longer than the slots."""
    correction: Annotated[str, one_of("markov", "rnn")] = "rnn"
    """How a slot depends on the drafted tokens before it: `rnn` (ReDrafter's recurrence), or `markov`
    (DSpark's)."""
    rank: Annotated[int, Field(gt=0, le=MAX_RANK)] = 256
    """Rank of the correction `markov`."""
    inject: bool = True
    """Whether slots start with the latest context, a residual path from the target's state to the
    head. Published drafters don't have this path."""
    mask_token_id: NonNegativeInt | None = None
    """Token of the target whose embedding the slots after the first start with, as in published
    drafters. None: each slot has a learned vector."""
    draft_vocab_size: PositiveInt | None = None
    """Size of a reduced draft vocabulary, which has the most frequent tokens of the distilled data;
    its head is trained, from the target's rows (with `init: target`). None is the whole vocabulary,
    with the target's own head, frozen. The target's whole size trains a head of all tokens."""
    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: each layer starts as the target's last one, but its output projections start at
    zero, so the slots' inputs pass through unchanged. `random`: random weights."""
    depth: PositiveInt | None = None
    """Draft tokens on the longest path of a tree; None: `block`. With the correction `rnn` it may be
    larger: the last slot's output then serves the tokens after it, too. May be changed when the
    drafter is loaded."""
    width: PositiveInt = 16
    """Paths that the search keeps at each depth. May be changed when the drafter is loaded."""
    candidates: PositiveInt = 128
    """Candidates of each slot, which the search ranks (not with `rnn`, which ranks all tokens). With
    few, tokens that the correction would choose are missing. May be changed when the drafter is
    loaded."""
    tree_nodes: PositiveInt = 48
    """Nodes of the tree: the most probable nodes of the search. May be changed when the drafter is
    loaded."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"depth", "width", "candidates", "tree_nodes"})

    @property
    def search_depth(self) -> int:
        """Draft tokens on the longest path of a tree."""
        return self.depth or self.block

    def __post_init__(self) -> None:
        problems = []
        if self.search_depth > self.block and self.correction != "rnn":
            problems.append(
                f"depth is {self.depth}, more than the {self.block} draft tokens of block, and correction {self.correction}; "
                "lower depth, or choose the correction rnn"
            )
        if self.num_slots is not None and self.num_slots > self.block:
            problems.append(f"num_slots is {self.num_slots}, more than the {self.block} draft tokens of block; lower num_slots")
        is_ranked = self.correction != "rnn"
        num_nodes, breadth = self.width * self.search_depth, max(self.width, self.candidates if is_ranked else 0)
        depth = f"block {self.block}" if self.depth is None else f"depth {self.depth}"
        options = f"width is {self.width}{f', candidates {self.candidates}' if is_ranked else ''} and {depth}"
        problems += search_problems(options, num_nodes, num_nodes * breadth)
        num_pairs = (self.block - 1) * self.candidates**2
        if is_ranked and num_pairs > MAX_PAIRS:
            problems.append(
                f"candidates is {self.candidates} and block {self.block}; more than {MAX_PAIRS} pairs of candidates "
                "((block - 1) x candidates x candidates) don't fit in memory: lower one of them"
            )
        raise_problems(problems)


DRAFTER_OPTIONS: dict[str, type[Any]] = {
    "block": BlockConfig,
    "draft_model": DraftModelConfig,
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "medusa": MedusaConfig,
    "mtp": MtpConfig,
    "redrafter": RedrafterConfig,
}
"""The options of each kind. RUNTIME_FIELDS may be changed when a trained drafter is loaded."""

FORMER_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "block": {"train_head": (False,)},
    "draft_model": {"pace": ("expected", "fixed"), "temperature": (0.0,)},
    "eagle": {"tree": ("dynamic",), "temperature": (0.0,)},
    "eagle3": {"temperature": (0.0,)},
    "medusa": {"heads": ("residual",)},
    "mtp": {"temperature": (0.0,)},
    "redrafter": {"head_rank": (None,), "rnn": (True,), "tree_padding": (None,)},
}
"""Options that kinds had before, with the values that every drafter of today has.

Saved drafters may still have them. A draft model's pace is that of a merge now, also of one drafter."""
FORMER_RUNTIME_FIELDS = frozenset({"pace", "temperature", "tree", "tree_padding"})
"""Those that could be changed when a trained drafter was loaded."""


def current_options(kind: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved drafter's options without former ones whose value every drafter of today has."""
    former = FORMER_OPTIONS.get(kind, {})
    return {name: value for name, value in saved.items() if value not in former.get(name, ())}
