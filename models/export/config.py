"""What becomes of a run's drafters when they are finished."""

from dataclasses import dataclass, field

import torch

from .package import require_names
from .registry import find_format

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(kw_only=True)
class ExportConfig:
    """A folder for the Hub (see `package`), and the formats of other programs."""

    formats: list[str] = field(default_factory=list)
    """Formats of other programs to write it in (`outrider export --help` names them), each in export/FORMAT; of several
    drafters, those of the format's kind."""
    dtype: str | None = None
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
    """Upload it there when all is done, private where it isn't there yet. Nothing there is overwritten."""
    overwrite: bool = False
    """Make the folder for the Hub anew where it holds something else than would be made now, such as a card of your own."""

    def __post_init__(self) -> None:
        for name in self.formats:
            find_format(name)
        if len(set(self.formats)) < len(self.formats):
            raise ValueError(f"export.formats is {self.formats}; name each once")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"export.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}, or null")
        try:
            require_names(base_model=self.base_model, repo=self.repo, licence=self.licence)
        except ValueError as error:
            raise ValueError(f"export.{error}") from error
        if self.push and self.repo is None:
            raise ValueError("export.push is on and export.repo is null; say where to: export.repo=user/name")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)
