"""Folder of a drafter for the Hub, for plain transformers and for readers.

    config.json, model.safetensors      the trained drafter (see `drafters/saved/folder`), if there is one
    merge.json                          the training-free drafters that draft with it, if any
    training.json, certificate.json     facts about its training, and its certificate, if there are any
    README.md                           the model card
    generation_config.json              greedy decoding; all other options come from the target
    custom_generate/                    the decode loop, for `model.generate(..., custom_generate=FOLDER)` (see `bundle`)

Nothing else is in such a folder, and nothing else is ever uploaded.
"""

import re
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...data.fields import first_of
from ...data.files import atomic_write_text, finish_replacing, read_dataclass, replacing_directory, write_json
from ..drafters.saved.build import require_unaltered
from ..drafters.saved.folder import (
    CONFIG_FILE,
    HUB_ID,
    MERGE_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    MergeFile,
    read_drafter_config,
    read_training_facts,
    tensor_names,
)
from ..drafters.saved.parts import DrafterParts, packaged_parts, parse_drafter_name
from ..llm.weight_files import INDEX_FILE
from .bundle import FOLDER, LICENCE_FILE, REQUIREMENTS_FILE, START_FILE, custom_generate_files
from .folders import NOTE_FILE

README_FILE, GENERATION_FILE, CERTIFICATE_FILE = "README.md", "generation_config.json", "certificate.json"
GENERATION_CONFIG = {"do_sample": False}
"""Default of `generate`: greedy, so that sampling must be requested. Stop tokens come from the
target."""
ALLOWED = frozenset(
    {
        *(CERTIFICATE_FILE, CONFIG_FILE, GENERATION_FILE, NOTE_FILE, README_FILE, TRAINING_FILE, "LICENSE", "NOTICE"),
        *(MERGE_FILE, INDEX_FILE, "added_tokens.json", "merges.txt", "vocab.json", "vocab.txt"),
        *("chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    }
)
"""Files that a drafter's folder, or its export, may have beside safetensors."""
UNNAMED = "the folder of this card: the drafter has no name on the Hub"
UNNAMED_TARGET = "set this to the directory of the target, which has no name on the Hub"
"""Comment in a card beside a target's local name; `UNNAMED` is the one beside a drafter's."""
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
NOT_WEIGHTS = ("optimizer", "scheduler", "trainer_state", "rng_state")


def make_package(name: Path | DrafterParts, output: Path, readme: str, certificate: Path | None = None) -> None:
    """Write the folder atomically, as a new folder or into an empty one.

    Raises ValueError for a folder that isn't empty, for a damaged drafter, for several trained
    drafters, and for a file that isn't a certificate.
    """
    # 1. Check the names, and the certificate.
    parts = parse_drafter_name(name)
    drafter = packaged_folder(parts)
    if certificate is not None:
        read_certificate(certificate)

    # 2. Write the files, and check them all: the drafter's are damaged where the copies are.
    with replacing_directory(output) as folder:
        require_new(output)  # here no other process can write it
        for file in (CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE):
            if drafter is not None and (drafter / file).is_file():
                shutil.copyfile(drafter / file, folder / file)
        if names := [part.name for part in parts.parts if part.folder is None]:
            write_json(folder / MERGE_FILE, asdict(MergeFile(training_free=names)))
        if certificate is not None:
            shutil.copyfile(certificate, folder / CERTIFICATE_FILE)
        atomic_write_text(folder / README_FILE, readme)
        write_json(folder / GENERATION_FILE, GENERATION_CONFIG)
        for file, text in custom_generate_files().items():
            atomic_write_text(folder / FOLDER / file, text)
        package_files(folder, called=str(drafter or parts.name))


def packaged_folder(parts: DrafterParts) -> Path | None:
    """Return the folder of the trained part; None without one.

    Raises ValueError for several, and for a model that drafts as it is.
    """
    if any(part.is_model for part in parts.parts):
        raise ValueError(
            f"{parts.name} drafts with a model of transformers as it is, which has a repository or folder of its own; package "
            f'the other parts, and decode with drafter="{parts.name}"'
        )
    if len(parts.folders) > 1:
        raise ValueError(
            f"{parts.name} has {len(parts.folders)} trained drafters, and a package holds the weights of one; package each, "
            'and decode with drafter="FOLDER+FOLDER"'
        )
    return next(iter(parts.folders), None)


def require_new(output: Path) -> None:
    """Raise ValueError if `output` exists and isn't an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; name a new folder, or remove that one first")


def require_names(*, base_model: str | None, repo: str | None, licence: str | None) -> None:
    """Raise ValueError for names that the Hub doesn't allow.

    Cards show these names, and their commands use them.
    """
    for option, name in (("base_model", base_model), ("repo", repo)):
        if name is not None and (HUB_ID.fullmatch(name) is None or "@" in name):
            raise ValueError(f"{option} is {name!r}; give a name on the Hub, user/name")
    if licence is not None and LICENCE.fullmatch(licence) is None:
        raise ValueError(f"licence is {licence!r}; give its name on the Hub, such as apache-2.0")


def names_left_open(card: str) -> list[str]:
    """List the local names in a card, each with the command that writes its name on the Hub."""
    names = ((UNNAMED, "the drafter", "repo"), (UNNAMED_TARGET, "its target", "base-model"))
    remedy = "the card names {} by a local folder: `outrider package --{} user/name` writes its name on the Hub"
    return [remedy.format(subject, option) for note, subject, option in names if note in card]


def package_files(folder: Path, called: str = "") -> dict[str, Path]:
    """List the files of a folder for sharing, by their names, sorted.

    Messages call the folder `called`. Raises ValueError for a folder without a drafter. Raises one
    ValueError with all files that must not be shared: links, hidden files, pickles, states of an
    optimizer, and unknown files.
    """
    # 1. List the files, and all that must not be shared.
    called = called or str(folder)
    finish_replacing(folder)
    if not folder.is_dir():
        raise ValueError(f"{called} is {'not a folder' if folder.exists() else 'missing'}; name a drafter's folder")
    files, problems = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if problem := _problem(path, name):
            problems.append(f"{name} ({problem})")
        elif path.is_file():
            files[name] = path
    if problems:
        raise ValueError(
            f"{called} holds files that must not be shared: {first_of(problems)}. Move them out, or "
            "make a new folder with `outrider package`"
        )

    # 2. Check that the folder has a drafter, and only its code.
    is_training_free = MERGE_FILE in files and CONFIG_FILE not in files
    if not is_training_free and (CONFIG_FILE not in files or not any(name.endswith(".safetensors") for name in files)):
        raise ValueError(f"{called} holds no drafter: it needs {CONFIG_FILE} and weights in safetensors")
    for name, path in files.items():
        if name.endswith(".safetensors"):
            tensor_names(path, f"{called}: {name}")
    if f"{FOLDER}/{START_FILE}" in files:
        _require_own(folder, files, called)
    return files


def _require_own(folder: Path, files: Collection[str], called: str) -> None:
    """Raise ValueError for a package without a readable drafter, or with other weights or code."""
    # 1. The drafter, by its configuration and its digests.
    try:
        packaged_parts(folder)
        if CONFIG_FILE in files:
            require_unaltered(folder, read_drafter_config(folder))
            read_training_facts(folder)
    except ValueError as error:
        raise ValueError(f"{called} holds no readable drafter: {str(error).replace(str(folder), called)}") from error
    # 2. The code: only files that the start file names.
    start = (folder / FOLDER / START_FILE).read_text(encoding="utf-8", errors="replace")
    code = {START_FILE, *(f"{name}.py" for name in re.findall(r"^\s*from \.(\w+) import", start, re.MULTILINE))}
    known = {WEIGHTS_FILE, *(f"{FOLDER}/{name}" for name in code)}
    if unknown := [name for name in files if name.endswith((".py", ".safetensors")) and name not in known]:
        raise ValueError(f"{called} holds files of something else: {first_of(unknown)}. Move them out")


def _problem(path: Path, name: str) -> str | None:
    """Describe why a file or folder isn't shared; None if it may be shared."""
    *parents, last = name.split("/")
    if path.is_symlink():
        return "a link"
    if any(part.startswith(".") for part in (*parents, last)):
        return "hidden"
    if path.is_dir():
        return None if name == FOLDER else "an unknown folder"
    if not path.is_file():
        return "not a plain file"
    if parents == [FOLDER]:
        return None if last in (LICENCE_FILE, REQUIREMENTS_FILE) or path.suffix == ".py" else "not code"
    if any(word in last.lower() for word in NOT_WEIGHTS):
        return "a state of training"
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        return "a pickle, which runs code when it is read"
    return None if last in ALLOWED or path.suffix == ".safetensors" else "unknown"


def is_package(folder: Path) -> bool:
    """Check whether a folder has a model card and the code for transformers."""
    finish_replacing(folder)
    return (folder / README_FILE).is_file() and (folder / FOLDER / START_FILE).is_file()


# --- the certificate's file


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
    """One line of the certificate."""

    subject: str
    method: str
    num_cases: int
    result: str
    passed: bool
    false_alarm_rate: float = 0.0
    """Bound on the probability that this line fails although everything is sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Content of a certificate.

    Fields with a default are set only if a target was certified too.
    """

    passed: bool
    false_alarm_rate: Annotated[float, Field(ge=0, le=1)]
    environment: dict[str, Any]
    lines: Annotated[list[CertificateLine], Field(min_length=1)]
    target: str | None = None
    weights_sha256: str | None = None
    suites: dict[str, str] = field(default_factory=dict)
    """Digest of the prompts of each suite, by its name."""
    dtype: str | None = None
    quantization: str | None = None
    """Quantisation of the target at load time; empty without."""
    chat_template_sha256: str | None = None
    form: str | None = None
    stage_layers: list[int] | None = None
    """Layers in each stage of a target in stages."""
    drafters: dict[str, str] = field(default_factory=dict)
    """Digest of each drafter's weights, by the drafter's name."""

    def __post_init__(self) -> None:
        if self.passed != all(line.passed for line in self.lines):
            raise ValueError("passed: the verdict contradicts the lines, so the file was altered; run `outrider certify` again")


def read_certificate(path: Path) -> Certificate:
    """Read a certificate.

    Raises ValueError for any other file.
    """
    return read_dataclass(Certificate, path)
