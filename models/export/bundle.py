"""The decoding code of this library as flat files: the content of `custom_generate/`.

transformers copies `custom_generate/generate.py` and the files that it imports by `from .name
import`, one folder deep. It raises an error if any package that they import is missing, even if
the import is inside a function. So we copy the modules that decoding needs, each under a flat name,
and change nothing but their import lines:

    from ..decoding.tree import DraftTree  ->  from .decoding_tree import DraftTree

Code for training that needs other packages is left out, and `absent.py` takes its place.
`arrays.py` replaces jaxtyping.

At every call, transformers scans all these files for imports before it runs the code that it has
already loaded. It reads a file that `generate.py` itself imports only once. It reads any other file
once for every path of imports to it. It also parses `generate.py`. So `generate.py` is a short file
that imports all others.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions, requires, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder with the library's packages, in a checkout and in an installed package alike."""
START = "models.export.custom_generate"
FOLDER = "custom_generate"
START_FILE, REQUIREMENTS_FILE, LICENCE_FILE = "generate.py", "requirements.txt", "LICENSE"
LEFT_OUT = frozenset(
    {
        "models.drafters.mtp_weights",
        "models.llm.config",
        "models.llm.gguf_files",
        "models.llm.loading",
        "models.llm.tensor_parallel",
        "models.llm.weight_stream",
    }
)
"""Modules to load, quantise, slice and stream a target; the caller of `generate` has already loaded
it. And one to read the head in its files: the drafter's folder has it."""
PACKAGES = ("pydantic", "torch", "transformers")
"""Packages that users need. transformers brings safetensors, huggingface_hub and numpy; pydantic
brings pydantic_core."""

ABSENT = '''"""Replacement for code that only training needs; outrider itself has it."""

from typing import Any


def __getattr__(name: str) -> Any:
    def absent(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is a part of training, which this folder doesn't contain; install outrider for it")

    return absent
'''

ARRAYS = '''"""Replacement for jaxtyping: `Float[torch.Tensor, "batch seq"]` is a torch.Tensor. The shapes are documentation."""

from typing import Any


class _Array:
    def __class_getitem__(cls, item: Any) -> Any:
        return item[0]


Bool = Float = Int = Shaped = UInt8 = _Array
'''

ENTRY = '''"""Entry point of `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`; see {start}.py."""

from typing import TYPE_CHECKING

from .{start} import generate as generate

if TYPE_CHECKING:  # transformers scans these lines: it reads each file in this list once, and others several times.
{imports}'''

HEADER = (
    "# {source} of outrider {version} (Apache-2.0), with changed import lines. This file is generated: edit the original.\n"
)


@cache
def custom_generate_files() -> Mapping[str, str]:
    """Generate the text of each file of `custom_generate/`, by its name, once for all packages of a process."""
    # 1. Copy the start module and all that it imports, under flat names.
    files = {"absent.py": ABSENT, "arrays.py": ARRAYS}
    release, to_visit = version("outrider"), [START]
    while to_visit:
        module = to_visit.pop()
        name = f"{_flat(module)}.py"
        if name in files:
            continue
        path = _path(module)
        text, imported = _rewrite(path.read_text(encoding="utf-8"), module)
        files[name] = HEADER.format(source=path.relative_to(ROOT).as_posix(), version=release) + text
        to_visit += imported

    # 2. Add the entry file, the requirements and the licence.
    others = sorted(name.removesuffix(".py") for name in files)
    imports = "".join(f"    from .{name} import __doc__ as _\n" for name in others if name != _flat(START))
    files[START_FILE] = ENTRY.format(start=_flat(START), imports=imports)
    lines = [line for line in requires("outrider") or () if "extra ==" not in line]
    needed = [line for line in lines if re.match(r"[\w-]+", line)[0] in PACKAGES]  # type: ignore[index]
    files[REQUIREMENTS_FILE] = "".join(f"{line.split(';')[0].strip()}\n" for line in sorted(needed))
    # A checkout with build outputs has several distributions, and not all contain the licence.
    licences = (distribution.read_text("licenses/LICENSE") for distribution in distributions(name="outrider"))
    files[LICENCE_FILE] = next(filter(None, licences))
    return dict(sorted(files.items()))


def _rewrite(text: str, module: str) -> tuple[str, list[str]]:
    """Rewrite a module's import lines as flat ones, and list the modules that it imports."""
    lines, imported = text.splitlines(keepends=True), []
    package = module.split(".") if _path(module).name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            flat = "arrays" if node.module == "jaxtyping" else None
        else:
            assert node.module is not None, f"{module} imports modules by `from . import`, which transformers doesn't follow"
            source = ".".join([*package[: len(package) - node.level + 1], node.module])
            flat = "absent" if source in LEFT_OUT else _flat(source)
            imported += [] if source in LEFT_OUT else [source]
        if flat is not None:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = re.sub(r"from\s+[\w.]+\s+import", f"from .{flat} import", line, count=1)
    return "".join(lines), imported


def _flat(module: str) -> str:
    """Flatten a module's name to that of its file.

    For example, models.decoding.tree becomes `decoding_tree`.
    """
    return module.removeprefix("models.").replace(".", "_")


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    package = path / "__init__.py"  # a folder alone may be the rest of a package that is gone
    return package if package.is_file() else path.with_suffix(".py")
