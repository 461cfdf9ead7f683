"""What becomes of a run's drafters when they are finished."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, TypeAdapter
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, different, one_of

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")


def known_formats(names: list[str]) -> list[str]:
    """Allow the formats and engines of the registry, each once."""
    from .registry import ENGINES, FORMATS  # imports torch and transformers, which composing a recipe needs not

    return TypeAdapter(list[Annotated[str, one_of(*FORMATS, *ENGINES)]]).validate_python(different(names))


@dataclass(kw_only=True, config=OPTIONS)
class ExportConfig:
    """A folder for the Hub (see `package`), and the formats of other programs."""

    formats: Annotated[list[str], AfterValidator(known_formats)] = field(default_factory=list)
    """Formats of other programs to write it in (`outrider export --help` names them), each in
    export/FORMAT; of several drafters, those of the format's kind. vllm and sglang stand for the
    format that the engine reads."""
    allow_no_format: bool = False
    """Train a drafter that no export format can hold, and so no serving engine can load, without the
    warning at the start."""
    dtype: Annotated[str, one_of(*DTYPES)] | None = None
    """float32, float16 or bfloat16, of these formats; null leaves the numbers as they are."""
    licence: str | None = None
    """The Hub's name of the drafter's licence, such as apache-2.0."""
    base_model: str | None = None
    """Hub id of the target, where it is trained from a directory."""
    certificate: str | None = None
    """What `outrider certify` wrote, to go along."""
    repo: str | None = None
    """Hub id of the drafter: `user/name`."""
    push: bool = False
    """Upload it there when all is done, private where it isn't there yet. Nothing there is
    overwritten."""
    overwrite: bool = False
    """Make the folder for the Hub anew where it holds something else than would be made now, such
    as a card of your own."""

    def __post_init__(self) -> None:
        if self.base_model or self.repo or self.licence:
            from .package import require_names  # as in `known_formats`

            require_names(base_model=self.base_model, repo=self.repo, licence=self.licence)
        if self.push and self.repo is None:
            raise ValueError("push is on and repo is null; say where to: export.repo=user/name")

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)
