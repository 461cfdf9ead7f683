"""The library's own decoding as flat files.

What `custom_generate/` of a drafter's folder holds. transformers copies
`custom_generate/generate.py` and the files that it imports by `from .name import`, one folder deep,
and refuses to run them where a package that one of them imports is absent, be it inside a function.
So the modules that decoding needs are copied, each under a flat name, with nothing changed but
their import lines:

    from ..decoding.tree import DraftTree  ->  from .decoding_tree import DraftTree

Code that only training runs and that needs other packages is left out, with `absent.py` in its
place; `arrays.py` stands for jaxtyping.

transformers goes through all these files at every call, for what they import, before it runs what
it has loaded already: each file of which `generate.py` is the first to tell is read once, any other
once for every path of imports to it. And `generate.py` itself it parses. So that is a short file
which names all the others.
"""

import ast
import re
from importlib.metadata import distributions, requires, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Where the library's folders lie, in a checkout and in an installed package alike."""
START = "models.export.custom_generate"
FOLDER = "custom_generate"
START_FILE, REQUIREMENTS_FILE, LICENCE_FILE = "generate.py", "requirements.txt", "LICENSE"
LEFT_OUT = frozenset(
    {"models.target.config", "models.target.quantization", "models.target.loading", "models.target.tensor_parallel"}
)
"""Loading, quantising and slicing a target: whoever calls `generate` has loaded it."""
PACKAGES = ("pydantic", "torch", "transformers")
"""What users need. transformers itself brings safetensors, huggingface_hub and numpy, pydantic
brings pydantic_core."""

ABSENT = '''"""In place of what only training needs, and outrider itself has."""

from typing import Any


def __getattr__(name: str) -> Any:
    def absent(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is a part of training, and not of this folder: install outrider for it")

    return absent
'''

ARRAYS = '''"""In place of jaxtyping: `Float[torch.Tensor, "batch seq"]` is a torch.Tensor. The shapes are for readers."""

from typing import Any


class _Array:
    def __class_getitem__(cls, item: Any) -> Any:
        return item[0]


Bool = Float = Int = Shaped = _Array
'''

ENTRY = '''"""What `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)` runs. Read on in {start}.py."""

from typing import TYPE_CHECKING

from .{start} import generate as generate

if TYPE_CHECKING:  # All files: transformers looks for these lines, and reads each once that is named here, others often.
{imports}'''

HEADER = "# {source} of outrider {version} (Apache-2.0), with import lines changed. Made by a program: change it there.\n"


def custom_generate_files() -> dict[str, str]:
    """Return the text of each file of `custom_generate/`, by its name."""
    files = {"absent.py": ABSENT, "arrays.py": ARRAYS}
    to_visit = [START]
    while to_visit:
        module = to_visit.pop()
        name = f"{_flat(module)}.py"
        if name in files:
            continue
        path = _path(module)
        text, imported = _rewrite(path.read_text(encoding="utf-8"), module)
        files[name] = HEADER.format(source=path.relative_to(ROOT).as_posix(), version=version("outrider")) + text
        to_visit += imported
    others = sorted(name.removesuffix(".py") for name in files)
    imports = "".join(f"    from .{name} import __doc__ as _\n" for name in others if name != _flat(START))
    files[START_FILE] = ENTRY.format(start=_flat(START), imports=imports)
    needed = [each for each in requires("outrider") or () if re.match(r"[\w-]+", each)[0] in PACKAGES]  # type: ignore[index]
    files[REQUIREMENTS_FILE] = "".join(f"{each.split(';')[0].strip()}\n" for each in sorted(needed))
    # Of several, as in a checkout that was built in, not all have it.
    files[LICENCE_FILE] = next(filter(None, (each.read_text("licenses/LICENSE") for each in distributions(name="outrider"))))
    return dict(sorted(files.items()))


def _rewrite(text: str, module: str) -> tuple[str, list[str]]:
    """Return a module's text with flat import lines, and the modules that it imports."""
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
    """Return the name of a module's file: `decoding_tree` of models.decoding.tree."""
    return module.removeprefix("models.").replace(".", "_")


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
