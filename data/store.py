"""A folder of shards: data files, each complete once it has a sidecar, and a manifest.

The manifest is written last. The sidecar `STEM-00003.json` is written after the shard
`STEM-00003.SUFFIX`; a shard without a sidecar doesn't count. `STEM-00003.stats.json` holds times
and counts of the shard's production; it is separate because these differ from run to run. `data.json`
holds facts about the data, by option: with them, an error names the option that changed, and no digest.
"""

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from .config import DataConfig, DataSource
from .fields import differences
from .files import TEMPORARY, atomic_write_bytes, read_dataclass, read_json, sha256_file, write_json
from .manifest import MANIFEST_FILE, BaseEntry, BaseManifest, TargetIdentity
from .raw_records import is_local, local_files
from .sources import PromptOverlap, has_records

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=BaseEntry)
M = TypeVar("M", bound=BaseManifest)
T = TypeVar("T")

STATS_SUFFIX = ".stats.json"
FACTS_FILE = "data.json"
DIGEST_LENGTH = 12
"""Digits of a digest that a message has."""
TARGET_PARTS = {
    "target.weights_sha256": "its weights",
    "target.config_sha256": "its config.json",
    "target.tokenizer_sha256": "its tokenizer",
}
"""What the digests of a target are of."""
TEMPLATE_OPTIONS = ("data.chat_template", "data.template_options")
FILE_CONTENT, TEMPLATE, SUITES, PYTHON = "content of data.path", "chat template", "eval.suites", "Python"
REMEDY = "Set output_dir to another folder, or delete {} to start again"


@dataclass(frozen=True, slots=True)
class ShardStore(Generic[Entry, M]):
    """Store of the shards in `directory`, with the dataclasses of sidecars and manifest.

    `facts` computes the fields of an entry that follow from its file; `check` raises ValueError if a
    complete shard file disagrees with the manifest.
    """

    directory: Path
    stem: str
    suffix: str
    entry: type[Entry]
    manifest: type[M]
    facts: Callable[[Path], Mapping[str, Any]]
    check: Callable[[Path, M], None] = lambda path, manifest: None

    @property
    def is_begun(self) -> bool:
        """Whether a run has marked the folder as its own."""
        return (self.directory / MANIFEST_FILE).exists()

    def path(self, index: int, suffix: str) -> Path:
        """Return the path of a file of shard `index`."""
        return self.directory / f"{self.stem}-{index:05d}{suffix}"

    def load(self) -> M:
        """Read the manifest. Raises ValueError if it is missing, malformed, or has wrong keys."""
        path = self.directory / MANIFEST_FILE
        if not path.exists():
            raise ValueError(f"{path} does not exist: {self.directory} holds no finished data. Run the stage distill first")
        return read_dataclass(self.manifest, path)

    def save(self, manifest: M) -> None:
        """Write the manifest, after removing partial files of killed processes."""
        for path in self.directory.glob(f".*{TEMPORARY}"):
            path.unlink()
        write_json(self.directory / MANIFEST_FILE, asdict(manifest))

    def save_data_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the options and digests of the data (`data_facts`), unless the folder has them."""
        if not (self.directory / FACTS_FILE).exists():
            write_json(self.directory / FACTS_FILE, facts)

    def write(self, index: int, data: bytes, **facts: Any) -> Entry:
        """Write a shard, then its sidecar, atomically; `facts` are the entry's other fields."""
        path = self.path(index, self.suffix)
        atomic_write_bytes(path, data)
        entry = self.entry(index=index, file=path.name, sha256=hashlib.sha256(data).hexdigest(), **facts)
        write_json(self.path(index, ".json"), asdict(entry))
        return entry

    def is_written(self, index: int) -> bool:
        """Return whether shard `index` is complete."""
        return self.path(index, ".json").exists()

    def missing(self, plan: Sequence[Sequence[T]]) -> list[T]:
        """Return the items of the shards that are not complete."""
        return [item for index, items in enumerate(plan) if not self.is_written(index) for item in items]

    def read_entry(self, index: int) -> Entry | None:
        """Read the sidecar of shard `index`, or return None if there is none.

        Raises ValueError if it is malformed.
        """
        path = self.path(index, ".json")
        if not path.exists():
            return None
        try:
            return read_dataclass(self.entry, path)
        except ValueError as error:
            raise ValueError(
                f"{error}. Delete {path}, then run the stage distill again: it recomputes only this shard"
            ) from error

    def entries(self, num_shards: int) -> list[Entry]:
        """Read the existing sidecars of the first `num_shards` shards."""
        return [entry for index in range(num_shards) if (entry := self.read_entry(index)) is not None]

    def read_stats(self, kind: type[T], num_shards: int) -> dict[int, T]:
        """Read the statistics of the shards. Missing ones are left out; their shards stay valid."""
        stats = {}
        for index in range(num_shards):
            path = self.path(index, STATS_SUFFIX)
            try:
                stats[index] = read_dataclass(kind, path)
            except ValueError as error:
                logger.warning("statistics of a shard are missing: %s", error)
        return stats

    def verify(self, entry: BaseEntry) -> None:
        """Raise ValueError, with problem and remedy, if a shard's file is missing or altered."""
        path = self.directory / entry.file
        if path.exists() and sha256_file(path) == entry.sha256:
            return
        problem = "was truncated or altered: its SHA-256 digest is not the recorded one" if path.exists() else "is missing"
        raise ValueError(
            f"the shard {path} {problem}. Delete it and {self.path(entry.index, '.json').name}, then run the stage distill "
            "again: it recomputes only this shard"
        )

    def require_described(self, entry: BaseEntry) -> None:
        """Raise ValueError if a shard's file is damaged, or if its entry doesn't describe it."""
        self.verify(entry)
        path, recorded = self.directory / entry.file, asdict(entry)
        wrong = [name for name, value in self.facts(path).items() if recorded[name] != value]
        if wrong or path != self.path(entry.index, self.suffix):
            sidecar = self.path(entry.index, ".json")
            raise ValueError(
                f"the entry of {path} doesn't describe it ({', '.join(wrong) or 'file'}): {MANIFEST_FILE} or {sidecar.name} "
                f"was altered. Delete {path} and {sidecar.name}, then run the stage distill again: "
                "it recomputes only this shard"
            )

    def is_complete(self, num_shards: int) -> bool:
        """Return whether the manifest is complete, and no shard was deleted since."""
        if not self.is_begun or not (manifest := self.load()).complete:
            return False
        return self.entries(num_shards) == manifest.shards

    def require_same(self, manifest: M, data_facts: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError, with every difference, if the folder's shards are of another run.

        `manifest` is today's run. With `data_facts` (see `describe_data`), other data are named by the
        options that changed.
        """
        if not self.is_begun:
            if any(self.directory.glob(f"{self.stem}-*")):
                remedy = REMEDY.format(self.directory)
                raise ValueError(f"{self.directory} holds shards but no {MANIFEST_FILE}, so their run is unknown. {remedy}")
            return
        earlier = self.load()
        changes = differences(earlier.facts(), manifest.facts())
        if "plan_sha256" in changes and "data_sha256" not in changes:
            changes["plan_sha256"] += ", which is the same data in shards of another size: restore distill.shard_examples"
        changes = describe_target_change(changes, earlier.target, manifest.target)
        path = self.directory / FACTS_FILE
        facts = read_json(path) if path.exists() else None
        if "chat_template_sha256" in changes:  # of answers
            changes["chat_template_sha256"] = describe_template_change(facts, data_facts or {})
        if "data_sha256" in changes and data_facts is not None:
            changes["data_sha256"] = describe_change(facts, data_facts)
            changes.pop("plan_sha256", None)  # it follows the data
            for name in [name for name in changes if f"data.{name} " in changes["data_sha256"]]:
                del changes[name]
        if changes:
            remedy = REMEDY.format(self.directory)
            raise ValueError(f"{self.directory} holds the shards of another run: {'; '.join(changes.values())}. {remedy}")

    def find_damage(self) -> tuple[M, list[str]]:
        """Return the manifest, and problems of the shards with remedies. Reads every byte.

        For an unfinished run it checks the existing shards. Raises ValueError if the manifest is
        missing or can't be read.
        """
        # 1. The expected shards: the manifest's, or in an unfinished run those with a sidecar.
        manifest, problems = self.load(), []
        sidecars = sorted(self.directory.glob(f"{self.stem}-*[0-9].json"))
        shards: dict[int, BaseEntry | None] = {int(path.stem.rpartition("-")[2]): None for path in sidecars}
        if manifest.complete:
            shards = {entry.index: entry for entry in manifest.shards}
            expected = {self.path(index, suffix) for index in shards for suffix in (".json", self.suffix)}
            strays = {*sidecars, *self.directory.glob(f"{self.stem}-*[0-9]{self.suffix}")} - expected
            problems += [f"{path} belongs to no shard of this run; delete it" for path in sorted(strays)]
        else:
            problems.append(
                f"the run is not complete ({len(shards)} shards are there); run the stage distill again: it resumes"
            )
        # 2. Each sidecar and each digest.
        for index, recorded in tqdm(shards.items(), desc="verify", unit="shard"):
            try:
                entry = self.read_entry(index)
                if entry is None or recorded not in (None, entry):
                    raise ValueError(
                        f"{self.path(index, '.json')} is missing, or differs from the shard's entry in {MANIFEST_FILE}. "
                        "Delete it, then run the stage distill again: it recomputes only this shard"
                    )
                self.require_described(entry)
                self.check(self.directory / entry.file, manifest)
            except (ValueError, OSError) as error:
                problems.append(str(error))
        if not shards:
            problems.append("there is no shard; delete the folder and run the stage distill again")
        return manifest, problems


def describe_data(data: DataConfig, chat_template: object, overlap: PromptOverlap | None = None) -> dict[str, Any]:
    """Return the data's options, and digests of the files behind them, as JSON values."""
    facts: dict[str, Any] = {f"data.{name}": value for name, value in asdict(data).items()}
    files = [file for source in data.all_sources for file in _data_files(source)]
    if files:
        digests = [sha256_file(file) for file in files]
        facts[FILE_CONTENT] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    if any(source.source == "stdlib" for source in data.all_sources):
        facts[PYTHON] = platform.python_version()
    facts[TEMPLATE] = hashlib.sha256(str(chat_template).encode()).hexdigest()
    return facts | ({} if overlap is None else {SUITES: overlap.suites})


def _data_files(source: DataSource) -> list[Path]:
    """Return the local files of a source; none for a folder of texts, whose files may be very many."""
    if source.path is None or not is_local(source.path):
        return []
    if source.source == "text" and not Path(source.path).is_file() and not has_records(source.path):
        return []
    return local_files(source.path)


def describe_change(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Name the options that changed, such as `data.limit was 20 and is 30`.

    `before` is None where nothing was recorded.
    """
    if before is None:
        return "the conversations are others than those that it was made from (its options weren't recorded)"
    changes = [
        _describe_fact(name, before, now)
        for name in before
        if name in now and before[name] != now[name] and name not in TEMPLATE_OPTIONS  # the template itself is compared
    ]
    return "; ".join(changes) or "the conversations (or the target's answers to them) changed, though no option of the data did"


def _describe_fact(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the change of one fact, by the option that the user can change."""
    earlier, current = before[name], now[name]
    if name == FILE_CONTENT:
        digests = f"{earlier[:DIGEST_LENGTH]}... to {current[:DIGEST_LENGTH]}..."
        where = f"data.path {now['data.path']}" if now.get("data.path") else "data.sources"
        return f"{where}: its conversations changed, sha256 {digests}"
    if name == TEMPLATE:
        return describe_template_change(before, now)
    if name == PYTHON:
        return f"data.source is stdlib, and Python was {earlier} and is {current}, which has other files"
    if name == SUITES:
        return "eval.suites changed, whose prompts are left out of the data (data.overlap_words)"
    return f"{name} was {_quoted(earlier)} and is {_quoted(current)}"


def describe_template_change(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Name the option that changed the chat template.

    `before` is None where nothing was recorded.
    """
    old, new = ((facts or {}).get("data.chat_template") for facts in (before, now))
    words = ["the one of the target's tokenizer" if name is None else repr(name) for name in (old, new)]
    if before is not None and (options := before.get("data.template_options")) != now.get("data.template_options"):
        return f"data.template_options was {_quoted(options)} and is {_quoted(now.get('data.template_options'))}"
    if before is None:
        return f"data.chat_template changed (it is {words[1]}; what it was wasn't recorded)"
    if old != new:
        return f"data.chat_template changed (it was {words[0]} and is {words[1]})"
    digests = [str(facts.get(TEMPLATE, "unknown"))[:DIGEST_LENGTH] for facts in (before, now)]
    return f"data.chat_template changed (it is {words[1]} as before, and its sha256 was {digests[0]}... and is {digests[1]}...)"


def describe_target_change(changes: Mapping[str, str], before: TargetIdentity, now: TargetIdentity) -> dict[str, str]:
    """Return the changes, with those of the target's digests in one text.

    That text names the option that changed.
    """
    digests = [name for name in changes if name in TARGET_PARTS]
    if not digests:
        return dict(changes)
    parts = " and ".join(TARGET_PARTS[name] for name in digests)
    if before.name != now.name:
        text = f"target.name_or_path was {before.name!r} and is {now.name!r}, with other {parts.replace('its ', '')}"
    elif before.revision != now.revision:
        earlier, revision = _quoted(before.revision), _quoted(now.revision)
        text = f"target.revision was {earlier} and is {revision}, with other {parts.replace('its ', '')}"
    else:
        text = f"target.name_or_path {now.name}: {parts} changed"
    return {"target.name_or_path": text} | {name: change for name, change in changes.items() if name not in digests}


def _quoted(value: Any) -> str:
    """Return a value as in a message: null for None."""
    return "null" if value is None else repr(value)
