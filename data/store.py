"""A folder of shards: data files, each complete once it has a sidecar, and a manifest.

The manifest is written last. The sidecar `STEM-00003.json` is written after the shard
`STEM-00003.SUFFIX`; a shard without a sidecar doesn't count. `STEM-00003.stats.json` holds times
and counts of the shard's production; it is separate because these differ from run to run. `data.json`
holds facts about the data, by option: with them, an error names the option that changed, and no digest.
"""

import hashlib
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from .config import DataConfig
from .fields import differences, name_digests
from .files import TEMPORARY, atomic_write_bytes, read_dataclass, read_json, sha256_file, write_json
from .manifest import MANIFEST_FILE, BaseEntry, BaseManifest, TargetIdentity
from .sources import PromptOverlap

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=BaseEntry)
M = TypeVar("M", bound=BaseManifest)
T = TypeVar("T")

STATS_SUFFIX = ".stats.json"
FACTS_FILE = "data.json"
TEMPLATE, SUITES, PYTHON = "chat template", "eval.suites", "Python"
TEMPLATE_CHANGED = "the chat template changed (data.chat_template and data.template_options, or the target's)"
DIGESTS = {
    "target.weights_sha256": "the target has other weights (target.name_or_path, target.revision)",
    "target.config_sha256": "the target has another config.json",
    "target.tokenizer_sha256": "the target has another tokenizer",
    "chat_template_sha256": TEMPLATE_CHANGED,
    TEMPLATE: TEMPLATE_CHANGED,
    PYTHON: "data.source is stdlib, and another Python has other files",
    f"{SUITES}.": "eval.suites changed, whose prompts are left out of the data (data.overlap_words)",
}
"""What a change of a digest means, in place of two long numbers."""
UNKNOWN_CHANGE = "the conversations (or the target's answers to them) changed, though no recorded option of the data did"
REMEDY = "Set output_dir to another folder, or delete {} to start again"


@dataclass(frozen=True, slots=True)
class ShardStore(Generic[Entry, M]):
    """Store of the shards in `directory`, with the dataclasses of sidecars and manifest.

    With `data_facts` (see `describe_data`) an error about other data names the options that changed.
    """

    directory: Path
    stem: str
    suffix: str
    entry: type[Entry]
    manifest: type[M]
    data_facts: Mapping[str, Any] | None = None

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
        """Write the manifest, after removing partial files of killed processes, and the facts of the data, once."""
        for path in self.directory.glob(f".*{TEMPORARY}"):
            path.unlink()
        if self.data_facts is not None and not (self.directory / FACTS_FILE).exists():
            write_json(self.directory / FACTS_FILE, self.data_facts)
        write_json(self.directory / MANIFEST_FILE, asdict(manifest))

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

    def require_intact(self, entry: BaseEntry) -> None:
        """Raise ValueError, with problem and remedy, if a shard's file is missing or altered."""
        path = self.directory / entry.file
        if path.exists() and sha256_file(path) == entry.sha256:
            return
        problem = "was truncated or altered: its SHA-256 digest is not the recorded one" if path.exists() else "is missing"
        raise ValueError(
            f"the shard {path} {problem}. Delete it and {self.path(entry.index, '.json').name}, then run the stage distill "
            "again: it recomputes only this shard"
        )

    def is_complete(self, num_shards: int) -> bool:
        """Return whether the manifest is complete, and no shard was deleted since."""
        if not self.is_begun or not (manifest := self.load()).complete:
            return False
        return self.entries(num_shards) == manifest.shards

    def require_same(self, manifest: M) -> None:
        """Raise ValueError, with every difference, if the folder's shards are of another run than today's `manifest`."""
        if not self.is_begun:
            if any(self.directory.glob(f"{self.stem}-*")):
                remedy = REMEDY.format(self.directory)
                raise ValueError(f"{self.directory} holds shards but no {MANIFEST_FILE}, so their run is unknown. {remedy}")
            return
        earlier = self.load()
        changes = differences(earlier.facts(), manifest.facts())
        if "plan_sha256" in changes and "data_sha256" not in changes:
            changes["plan_sha256"] += ", which is the same data in shards of another size: restore distill.shard_examples"
        if not changes.keys().isdisjoint(DIGESTS):
            changes |= differences(_names(earlier.target), _names(manifest.target))
        if "data_sha256" in changes and self.data_facts is not None:
            changes.pop("plan_sha256", None)  # it follows the data
            path = self.directory / FACTS_FILE
            changes |= data_changes(read_json(path) if path.exists() else {}, self.data_facts)
            del changes["data_sha256"]
            changes = {name: text for name, text in changes.items() if f"data.{name}" not in changes}
        if changes:
            texts, remedy = name_digests(changes, DIGESTS), REMEDY.format(self.directory)
            raise ValueError(f"{self.directory} holds the shards of another run: {'; '.join(texts)}. {remedy}")

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
                self.require_intact(entry)
            except (ValueError, OSError) as error:
                problems.append(str(error))
        if not shards:
            problems.append("there is no shard; delete the folder and run the stage distill again")
        return manifest, problems


def describe_data(data: DataConfig, chat_template: object, overlap: PromptOverlap | None = None) -> dict[str, Any]:
    """Return the data's options, and digests of the chat template and of the evaluation's prompts, as JSON values."""
    facts: dict[str, Any] = {f"data.{name}": value for name, value in asdict(data).items()}
    if any(source.source == "stdlib" for source in data.all_sources):
        facts[PYTHON] = platform.python_version()
    facts[TEMPLATE] = hashlib.sha256(str(chat_template).encode()).hexdigest()
    return facts | ({} if overlap is None else {SUITES: overlap.suites})


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe the facts of data (see `describe_data`) that changed, as far as both have them, by their names."""
    shared = [name for name in before if name in now]
    changes = differences({name: before[name] for name in shared}, {name: now[name] for name in shared})
    return changes or {"data": UNKNOWN_CHANGE}


def _names(target: TargetIdentity) -> dict[str, str | None]:
    return {"target.name_or_path": target.name, "target.revision": target.revision}
