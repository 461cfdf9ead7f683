"""Cells of the study of drafter kinds: which drafter is trained on how many labels, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PARTS = RATES, EQUAL, FULL, WEIGHTS, CURVE, CORRECTIONS, ON_POLICY, MIXTURE = (
    "rates",
    "equal",
    "full",
    "weights",
    "curve",
    "corrections",
    "on_policy",
    "mixture",
)
NODES = 40
"""Draft tokens of every tree."""
POSITIONS_PER_TEXT = 64
"""Labelled positions per text and step, as in conf=demo."""
UNIFORM, DPACE = "uniform", "dpace"
MIXED_LOSS = "{cross_entropy: 0.1, tv: 0.9}"
"""`train.loss` of the part `mixture`."""
ON_POLICY_EVERY = 2
"""`train.on_policy_every` of the part `on_policy`: a quarter of every second step's positions."""
RATE_VALUES = (2e-3, 4e-3, 8e-3, 16e-3)
"""Learning rates of the part `rates`. Each recipe has one of them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kind of drafter with its options, and its search for a tree of NODES nodes."""

    title: str
    recipe: str
    """File of conf/drafter/ without its ending."""
    parts: tuple[str, ...]
    """Parts of the study that measure it."""
    options: tuple[str, ...] = ()
    """Further overrides of the recipe."""
    search: Mapping[str, Any] = field(default_factory=dict, hash=False)


MAIN = (RATES, EQUAL, FULL, WEIGHTS, CURVE, ON_POLICY, MIXTURE)
UNWEIGHTED = (RATES, EQUAL, FULL, CURVE)
LATTICE, RECURRENT = {"width": 16, "candidates": 128}, {"width": 16, "depth": 5}
"""Searches of block drafters. All drafters search 5 tokens deep, but Medusa and the lattice, which have no
more than they were trained for."""
AS_DEEP_AS_TRAINED = {"width": 16, "depth": 4}
"""The recurrent search that a comparison of corrections needs."""
VARIANTS = {
    "redrafter": Variant(title="ReDrafter", recipe="redrafter_demo", parts=MAIN, search={"beam_width": 16, "beam_length": 5}),
    "block": Variant(title="block, rnn", recipe="block_demo", parts=MAIN, search=RECURRENT),
    "redrafter2": Variant(title="ReDrafter-2", recipe="redrafter2_demo", parts=UNWEIGHTED, search=RECURRENT),
    "eagle3": Variant(title="EAGLE-3", recipe="eagle3_demo", parts=MAIN, search={"depth": 5, "top_k": 8}),
    "medusa": Variant(title="Medusa", recipe="medusa_demo", parts=UNWEIGHTED),
    "draft_model": Variant(
        title="draft model", recipe="draft_model_demo", parts=(RATES, EQUAL, FULL), search={"length": 5, "top_k": 8}
    ),
    "block_rnn_4": Variant(title="block, rnn, 4 deep", recipe="block_demo", parts=(CORRECTIONS,), search=AS_DEEP_AS_TRAINED),
    "block_bilinear": Variant(
        title="block, bilinear",
        recipe="block_demo",
        parts=(CORRECTIONS,),
        options=("drafter.correction=bilinear",),
        search=LATTICE,
    ),
    "block_markov": Variant(
        title="block, Markov",
        recipe="block_demo",
        parts=(CORRECTIONS,),
        options=("drafter.correction=markov",),
        search=LATTICE,
    ),
    "block_dspark": Variant(title="block, DSpark", recipe="block_dspark_demo", parts=(CORRECTIONS,), search=LATTICE),
    "block_none": Variant(
        title="block, none", recipe="block_demo", parts=(CORRECTIONS,), options=("drafter.correction=none",), search=LATTICE
    ),
}
"""The drafters by name. Another drafter is one more entry."""


@dataclass(frozen=True, kw_only=True, order=True)
class Size:
    """Length of a training."""

    steps: int
    positions: int
    """Labelled positions per step."""

    @property
    def labels(self) -> int:
        """Labelled positions of the whole training. A position counts each time that it is trained."""
        return self.steps * self.positions

    @property
    def name(self) -> str:
        return f"{self.steps}x{self.positions}"


FEW, ALL = Size(steps=150, positions=384), Size(steps=500, positions=1024)
"""A short training, and the demo's whole one."""
BETWEEN = (
    Size(steps=50, positions=192),
    Size(steps=150, positions=192),
    Size(steps=300, positions=384),
    Size(steps=300, positions=768),
)
"""Further sizes of the curves."""
Sizes = Mapping[str, tuple[Size, ...]]
SIZES: Sizes = {
    RATES: (FEW, ALL),
    EQUAL: (FEW,),
    FULL: (ALL,),
    WEIGHTS: (FEW,),
    CURVE: BETWEEN,
    CORRECTIONS: (FEW,),
    ON_POLICY: (FEW,),
    MIXTURE: (FEW,),
}
"""Sizes of the trainings of each part."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A training of one drafter, and greedy decoding with it."""

    part: str
    variant: str
    size: Size
    seed: int
    rate: float
    """Peak learning rate."""

    @property
    def label_weights(self) -> str:
        """The training's `train.label_weights`."""
        return DPACE if self.part == WEIGHTS else UNIFORM

    @property
    def change(self) -> str:
        """What the training changes besides its rate and seed: the loss, positions, or the weights of the labels."""
        return self.part if self.part in (ON_POLICY, MIXTURE) else self.label_weights

    @property
    def training(self) -> str:
        """Name of the training. Cells of several parts may have the same one."""
        return f"{self.variant}-{self.size.name}-{self.change}-{self.rate:g}-{self.seed}"

    @property
    def name(self) -> str:
        """Name of the cell. The rates are compared on other prompts than everything else."""
        return f"{RATES}-{self.training}" if self.part == RATES else self.training


def cells_of(
    parts: Sequence[str],
    variants: Sequence[str],
    *,
    rates: Mapping[str, float],
    seeds: Sequence[int],
    curve_seeds: Sequence[int],
    sizes: Sizes,
) -> list[Cell]:
    """Return the cells of the chosen parts and drafters, in the order in which they are measured.

    `rates` has the learning rate of each drafter's recipe. In a part, all drafters are measured with
    a seed before any of them with the next seed.
    """
    return [
        Cell(part=part, variant=name, size=size, seed=seed, rate=rate)
        for part in parts
        for seed in (curve_seeds if part in (RATES, CURVE) else seeds)
        for size in sizes[part]
        for name in variants
        if part in VARIANTS[name].parts
        for rate in (RATE_VALUES if part == RATES else (rates[name],))
    ]
