"""A drafter as a folder for the Hub.

What `load_drafter` reads, what plain transformers runs, and what people read.

    config.json, model.safetensors      the drafter (see `drafters/files`)
    training.json, certificate.json     what its training took, and that its decoding is lossless; where they are known
    README.md                           the model card
    generation_config.json              greedy decoding; all else is the target's
    custom_generate/                    the decoding itself, for `model.generate(..., custom_generate=FOLDER)` (see `bundle`)

Nothing else is in such a folder, and nothing else is ever uploaded.
"""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ...data.files import atomic_write_text, finish_replacing, replacing_directory, write_json
from ..drafters.saved.download import HUB_ID
from ..drafters.saved.folder import (
    CONFIG_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    count_tensors,
    read_drafter_config,
    read_training_facts,
)
from .bundle import FOLDER, LICENCE_FILE, REQUIREMENTS_FILE, START_FILE, custom_generate_files
from .certificate_file import read_certificate
from .folders import NOTE_FILE

README_FILE, GENERATION_FILE, CERTIFICATE_FILE = "README.md", "generation_config.json", "certificate.json"
GENERATION_CONFIG = {"do_sample": False}
"""What is drafted for may well be sampled, but not unless somebody asks for it. Stop tokens are the
target's business."""
TOKENIZER_FILES = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
ALLOWED = frozenset(
    {
        *(CERTIFICATE_FILE, CONFIG_FILE, GENERATION_FILE, NOTE_FILE, README_FILE, TRAINING_FILE, "LICENSE", "NOTICE"),
        *TOKENIZER_FILES,
    }
)
"""Beside safetensors: what a drafter's folder, or one in another program's format, may hold."""
UNNAMED = "the folder of this card: the drafter has no name on the Hub"
UNNAMED_TARGET = "a local directory: the target has no name on the Hub"
"""What a card writes beside the local name of a drafter, or of a target."""
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
NOT_WEIGHTS = ("optimizer", "scheduler", "trainer_state", "rng_state")
MOST_PROBLEMS = 10
"""Named in one message."""


def make_package(drafter: Path, output: Path, readme: str, certificate: Path | None = None) -> None:
    """Write the folder, whole or not at all, into one that is empty or not there.

    Raises ValueError for a folder that isn't empty, for a drafter that is damaged, and for a
    certificate that isn't one.
    """
    require_new(output)
    read_drafter_config(drafter)
    read_training_facts(drafter)
    count_tensors(drafter / WEIGHTS_FILE)
    if certificate is not None:
        read_certificate(certificate)
    with replacing_directory(output) as folder:
        for name in (CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE):
            if (drafter / name).is_file():
                shutil.copyfile(drafter / name, folder / name)
        if certificate is not None:
            shutil.copyfile(certificate, folder / CERTIFICATE_FILE)
        atomic_write_text(folder / README_FILE, readme)
        write_json(folder / GENERATION_FILE, GENERATION_CONFIG)
        for name, text in custom_generate_files().items():
            atomic_write_text(folder / FOLDER / name, text)
        package_files(folder)


def require_new(output: Path) -> None:
    """Raise ValueError where `output` exists and is no empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already; name a new folder, or remove that one first")


def require_names(*, base_model: str | None, repo: str | None, licence: str | None) -> None:
    """Raise ValueError for what can't be a name on the Hub.

    A card repeats them, and its commands run with them.
    """
    for option, name in (("base_model", base_model), ("repo", repo)):
        if name is not None and (HUB_ID.fullmatch(name) is None or "@" in name):
            raise ValueError(f"{option} is {name!r}; give a name on the Hub, user/name")
    if licence is not None and LICENCE.fullmatch(licence) is None:
        raise ValueError(f"licence is {licence!r}; give the Hub's name of it, such as apache-2.0")


def names_left_open(card: str) -> list[tuple[str, str]]:
    """Return what a card calls by a local name, and the option that gives its name on the Hub."""
    names = ((UNNAMED, "the drafter", "repo"), (UNNAMED_TARGET, "its target", "base_model"))
    return [(what, option) for note, what, option in names if note in card]


def package_files(folder: Path, called: str = "") -> dict[str, Path]:
    """Return the files of a folder that is to be shared, by their names there, in order.

    Messages name it as it is `called`. Raises ValueError, naming all of them, for files that don't
    belong into one: links, hidden files, pickles, states of an optimizer, anything unknown; and for
    a folder that holds no drafter.
    """
    called = called or str(folder)
    finish_replacing(folder)
    if not folder.is_dir():
        raise ValueError(f"{called} is {'no folder' if folder.exists() else 'not there'}; name a drafter's folder")
    files, problems = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if problem := _problem(path, name):
            problems.append(f"{name} ({problem})")
        elif path.is_file():
            files[name] = path
    if problems:
        more = f" and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise ValueError(
            f"{called} holds what isn't to be shared: {', '.join(problems[:MOST_PROBLEMS])}{more}. Move it out, or make a new "
            "folder with `outrider package`"
        )
    if CONFIG_FILE not in files or not any(name.endswith(".safetensors") for name in files):
        raise ValueError(f"{called} holds no drafter: it needs {CONFIG_FILE} and weights in safetensors")
    for name, path in files.items():
        if name.endswith(".safetensors"):
            count_tensors(path, f"{called}: {name}")
    if f"{FOLDER}/{START_FILE}" in files:
        _require_own(folder, files, called)
    return files


def _require_own(folder: Path, files: Collection[str], called: str) -> None:
    """Raise ValueError for a package without a readable drafter, or with unknown files.

    Weights and code must be those that belong to the drafter.
    """
    try:
        read_drafter_config(folder)
    except ValueError as error:
        raise ValueError(f"{called} holds no drafter that could be read: {str(error).replace(str(folder), called)}") from error
    start = (folder / FOLDER / START_FILE).read_text(encoding="utf-8", errors="replace")
    code = {START_FILE, *(f"{name}.py" for name in re.findall(r"^\s*from \.(\w+) import", start, re.MULTILINE))}
    known = {WEIGHTS_FILE, *(f"{FOLDER}/{name}" for name in code)}
    if unknown := [name for name in files if name.endswith((".py", ".safetensors")) and name not in known]:
        raise ValueError(f"{called} holds what is no part of its drafter: {', '.join(unknown[:MOST_PROBLEMS])}. Move it out")


def _problem(path: Path, name: str) -> str | None:
    """Why a file or folder isn't shared; None where it may be."""
    *parents, last = name.split("/")
    if path.is_symlink():
        return "a link"
    if any(part.startswith(".") for part in (*parents, last)):
        return "hidden"
    if path.is_dir():
        return None if name == FOLDER else "an unknown folder"
    if not path.is_file():
        return "no plain file"
    if parents == [FOLDER]:
        return None if last in (LICENCE_FILE, REQUIREMENTS_FILE) or path.suffix == ".py" else "no code"
    if any(word in last.lower() for word in NOT_WEIGHTS):
        return "a state of training"
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        return "a pickle, which runs code when it is read"
    return None if last in ALLOWED or path.suffix == ".safetensors" else "unknown"


def is_package(folder: Path) -> bool:
    """Return whether a folder has a model card and the code for transformers."""
    finish_replacing(folder)
    return (folder / README_FILE).is_file() and (folder / FOLDER / START_FILE).is_file()
