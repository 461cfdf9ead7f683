"""Configuration of the export of a run's drafters."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, different, one_of

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")


FORMATS = (
    *("speculators-dspark", "speculators", "eagle3", "dspark", "apple", "medusa", "tensorrt-llm"),
    *("eagle1-vllm", "eagle1-sglang", "mtp", "transformers"),
)
"""Names of the formats in the registry, which loads torch."""
ENGINES = ("vllm", "sglang")


@dataclass(kw_only=True, config=OPTIONS)
class ExportConfig:
    """Folder for the Hub (see `package`), and exports to other programs' formats."""

    formats: Annotated[list[Annotated[str, one_of(*FORMATS, *ENGINES)]], AfterValidator(different)] = field(
        default_factory=list
    )
    """Formats of other programs to export to (`outrider export --help` lists them), each in
    export/FORMAT. With several drafters, those of the format's kind are exported. vllm and sglang stand
    for the format that the engine reads."""
    dtype: Annotated[str, one_of(*DTYPES)] | None = None
    """float32, float16 or bfloat16: type of the exported numbers; null leaves them unchanged."""

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)
