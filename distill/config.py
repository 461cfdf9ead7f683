"""How a target is distilled."""

import re
from dataclasses import field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from ..data.choices import FEATURES, STATE_DTYPES
from ..data.fields import OPTIONS, NonNegativeInt, PositiveInt, Seed, Share, different, one_of, raise_problems

if TYPE_CHECKING:
    from ..models.decoding.sampling import Sampling

MODES = ("label", "regenerate")
REGENERATION_OPTIONS = (
    *("engine", "temperature", "top_k", "top_p", "max_new_tokens", "decode_batch_size", "drafter", "drafter_settings"),
    *("kv_budget_gib", "predictor", "base_url", "served_model"),
)
ENGINES = ("auto", "decoder", "batch", "continuous", "openai")
# The address isn't quoted: there may be a password in it.
NO_ADDRESS = (
    "base_url is no address of the form http://HOST:8000/v1; a key belongs into the environment variable "
    "OPENAI_API_KEY, not into the address"
)


@dataclass(
    kw_only=True, config=ConfigDict(**OPTIONS, hide_input_in_errors=True)
)  # not frozen: OmegaConf would refuse every override
class DistillConfig:
    """What is stored of the target's answers, and in which portions it is computed and written."""

    horizon: PositiveInt = 5
    """Tokens of the target's own continuation that are labelled after every position."""

    features: Annotated[str, one_of(*FEATURES)] = "none"
    """`none` stores no hidden states (training recomputes them); `last_hidden` the target's last ones, which all drafters but
    EAGLE-3 and draft models read."""

    feature_layers: Annotated[list[NonNegativeInt], AfterValidator(different)] = field(default_factory=list)
    """Layers of the target whose inputs are stored: those that an EAGLE-3 drafter reads (drafter.feature_layers), which then
    trains without a pass of the target."""

    features_dtype: Annotated[str, one_of(*STATE_DTYPES)] = "bfloat16"
    """Type of the stored states: `bfloat16`, or `float8_e4m3fn` or `int8` with a scale for each token, in half the space."""

    top_logprobs: PositiveInt | None = None
    """So many of the target's likeliest next tokens are stored with their log-probabilities, at every position that training
    may ask for: what train.teacher=top_k learns from. None stores none."""

    shard_examples: PositiveInt = 256
    """Examples in a shard: what an interruption loses at most, and what is held in memory until it is written."""

    batch_tokens: PositiveInt = 8192
    """Tokens of text, padding included, in one forward pass; a longer text goes alone. Its keys and values are kept for all
    labels of the batch: lower this where memory runs out."""

    mode: Annotated[str, one_of(*MODES)] = "label"
    """`label` takes the texts as the data have them; `regenerate` has the target answer every turn anew first."""

    engine: Annotated[str, one_of(*ENGINES)] = "auto"
    """What regenerates: `decoder` (outrider's own), `batch` (the same without drafters, in batches by predicted length under
    `kv_budget_gib`), `continuous` (transformers' continuous batching), `openai` (a server at
    `base_url`); `auto` is `decoder`: no other has been measured on a GPU."""

    temperature: NonNegativeFloat = 0.0
    """Of regenerated answers; 0 is greedy."""

    top_k: PositiveInt | None = None
    """Sample regenerated answers from the k likeliest tokens only; None samples from all."""

    top_p: Share | None = None
    """Sample from the fewest tokens whose probabilities sum to top_p; None samples from all."""

    max_new_tokens: PositiveInt = 1024
    """Longest regenerated answer. `data.max_length` bounds it too, together with its prompt."""

    seed: Seed = 0
    """Of sampled answers: each has a seed of its own, made of this one, the conversation's id and the turn."""

    decode_batch_size: PositiveInt | None = None
    """Answers in the making at a time: rows of a batch, or requests in flight. None leaves it to the engine."""

    drafter: str | None = None
    """Directory of a trained drafter that speeds the engine `decoder` up; the text stays the target's."""

    drafter_settings: dict[str, Any] = field(default_factory=dict)
    """Its run-time options, as in `eval.settings`: {beam_width: 4, tree_nodes: 5}, say."""

    kv_budget_gib: PositiveFloat = 4.0
    """Memory for the keys and values of a batch of the engine `batch`, in GiB; reading its prompts takes some besides."""

    predictor: Annotated[str, Field(min_length=1)] | None = None
    """What predicts the lengths of answers: `none`, `light`, or a directory or Hub id of a
    sequence-classification model. None is `light` for the engine `batch`; the engine `continuous`
    admits the longest first where one is named."""

    base_url: str | None = None
    """Of the server that the engine `openai` asks, with its version: http://HOST:8000/v1."""

    served_model: str | None = None
    """The target's name on that server; None takes `target.name_or_path` or the only model served."""

    def __post_init__(self) -> None:
        raise_problems(self._features_problems() + self._engine_problems() + self._server_problems() + self._mode_problems())

    @property
    def sampling(self) -> "Sampling":
        """How regenerated answers are sampled."""
        from ..models.decoding.sampling import Sampling  # imports torch, which composing a recipe needs not

        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def last_hidden(self) -> bool:
        """Whether the target's last hidden states are stored."""
        return self.features == "last_hidden"

    def _features_problems(self) -> list[str]:
        if self.features_dtype != "bfloat16" and not self.last_hidden and not self.feature_layers:
            stored = f"features_dtype is {self.features_dtype}, and nothing is stored in it"
            return [f"{stored}; set features or feature_layers too"]
        return []

    def _mode_problems(self) -> list[str]:
        """Options of regeneration would change nothing where nothing is regenerated."""
        if self.mode != "label":
            return []
        if idle := [name for name in REGENERATION_OPTIONS if getattr(self, name) != getattr(DEFAULTS, name)]:
            reason = "mode is 'label', which regenerates nothing, and options of regenerating are set"
            return [f"{reason}: {', '.join(idle)}; set mode to regenerate, or leave them out"]
        return []

    def _engine_problems(self) -> list[str]:
        problems = []
        if self.predictor is not None and self.engine not in ("batch", "continuous"):
            problems.append(
                f"predictor is {self.predictor!r} and engine {self.engine!r}; only the engines batch and continuous schedule "
                "by length: name one of them, or leave the predictor out"
            )
        if self.engine == "batch" and self.decode_batch_size is not None:
            problems.append(
                f"decode_batch_size is {self.decode_batch_size}, and the engine batch makes its batches as large as "
                "kv_budget_gib allows: set that, and leave decode_batch_size out"
            )
        if self.drafter is not None and self.engine not in ("auto", "decoder"):
            problems.append(
                f"drafter is {self.drafter!r} and engine {self.engine!r}; only the engine decoder uses one: set engine to "
                "decoder, or leave the drafter out"
            )
        if self.drafter_settings and self.drafter is None:
            problems.append("drafter_settings are those of a drafter, and none is named; set drafter too")
        return problems

    def _server_problems(self) -> list[str]:
        problems = []
        if self.engine == "openai":
            if self.base_url is None:
                problems.append("engine is 'openai' and base_url is missing; give the server's, such as http://HOST:8000/v1")
        elif self.base_url is not None or self.served_model is not None:
            problems.append(f"base_url and served_model are the engine openai's, and engine is {self.engine!r}; leave them out")
        if self.base_url is not None and not is_address(self.base_url):
            problems.append(NO_ADDRESS)
        return problems


def is_address(base_url: str) -> bool:
    """Whether `base_url` is the address of a server, without a password in it."""
    try:
        url = urlsplit(base_url)
        host, _ = url.hostname or "", url.port
        is_number = ":" in host or re.fullmatch(r"\d+(\.\d+){3}", host)
        is_host = bool(ip_address(host)) if is_number else re.fullmatch(r"[\w.-]+", host) is not None
    except ValueError:  # brackets that aren't closed, no such port, no such IP address
        is_host = False
    is_plain = base_url.isprintable() and " " not in base_url
    return is_host and is_plain and url.scheme in ("http", "https") and "@" not in url.netloc


DEFAULTS = DistillConfig(mode="regenerate")
