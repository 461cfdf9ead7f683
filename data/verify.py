"""Everything that is wrong with a folder of shards, at once."""

from collections import Counter
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from .files import read_dataclass
from .manifest import MANIFEST_FILE, Manifest, ShardEntry, load_manifest
from .shards import read_entry, read_shard, sidecar_path
from .types import UNKNOWN, DistilledExample

T = TypeVar("T")


def find_damage(directory: Path) -> tuple[Manifest, list[str]]:
    """The manifest of the shards in `directory`, and what is wrong with them, each with its remedy.

    Every byte is read: digests, and what the tensors say against what the manifest does. Of an unfinished distillation, the
    shards that are there. Raises ValueError where there is no manifest, or it can't be read.
    """
    manifest = load_manifest(directory)
    problems: list[str] = []
    entries = manifest.shards if manifest.complete else read_sidecars(ShardEntry, directory, "shard-*[0-9].json", problems)
    if not manifest.complete:
        problems.append(
            f"the distillation is not complete ({len(entries)} shards are there); run the stage distill again, which goes on "
            "from there"
        )
    ids: Counter[str] = Counter()
    for entry in tqdm(entries, desc="verify", unit="shard"):
        try:
            if read_entry(directory, entry.index) != entry:
                raise ValueError(
                    f"{sidecar_path(directory, entry.index)} is missing, or doesn't say of its shard what {MANIFEST_FILE} "
                    "says. Delete it, then run the stage distill again: it makes just this shard anew"
                )
            examples = read_shard(directory, entry)
        except (ValueError, OSError) as error:
            problems.append(str(error))
            continue
        ids.update(example.example.id for example in examples)
        problems += [f"{directory / entry.file} {problem}" for problem in _contradictions(entry, examples, manifest)]
    if doubled := [id for id, count in ids.items() if count > 1]:
        problems.append(f"{len(doubled)} examples are there twice, such as {doubled[0]!r}: distil into an empty folder")
    if manifest.complete and not entries:
        problems.append("the distillation holds no shard; delete the folder and distil again")
    known = {entry.file for entry in entries} | {sidecar_path(directory, entry.index).name for entry in entries}
    files = sorted([*directory.glob("shard-*.safetensors"), *directory.glob("shard-*[0-9].json")])
    problems += [
        f"{path} belongs to no shard of this distillation; delete it"
        for path in files
        if manifest.complete and path.name not in known
    ]
    return manifest, problems


def read_sidecars(cls: type[T], directory: Path, pattern: str, problems: list[str]) -> list[T]:
    """The sidecars of an unfinished run that are there; what is wrong with the others is added to `problems`."""
    entries = []
    for path in sorted(directory.glob(pattern)):
        try:
            entries.append(read_dataclass(cls, path))
        except ValueError as error:
            problems.append(f"{error}. Delete {path}, then run the stage distill again: it makes just this shard anew")
    return entries


def _contradictions(entry: ShardEntry, examples: list[DistilledExample], manifest: Manifest) -> list[str]:
    """What a shard's tensors say against its entry and the manifest. (A digest tells only that the bytes are those written.)"""
    remedy = "It comes from another version or another run: distil again into an empty folder"
    problems = []
    num_tokens = sum(len(example.example.input_ids) for example in examples)
    num_labels = sum(int((example.continuations[:, 0] != UNKNOWN).sum()) for example in examples)
    if (num_tokens, num_labels) != (entry.num_tokens, entry.num_labels):
        problems.append(
            f"has {num_tokens} tokens and {num_labels} labels, not {entry.num_tokens} and {entry.num_labels}. {remedy}"
        )
    stored = {_stored(example) for example in examples}
    wanted = (manifest.features == "last_hidden", tuple(manifest.feature_layers), manifest.top_logprobs)
    if stored != {wanted}:
        problems.append(
            f"holds (last hidden states, layers, likeliest tokens) {', '.join(map(str, stored))} and not {wanted}. {remedy}"
        )
    vocab_size = manifest.target.vocab_size
    for example in examples:
        tokens, labels = example.example.input_ids, example.continuations
        if labels.shape[1] != manifest.horizon:
            problems.append(f"labels {labels.shape[1]} tokens and not {manifest.horizon}. {remedy}")
            break
        lowest, highest = min(int(tokens.min()), int(labels.min()) - UNKNOWN), max(int(tokens.max()), int(labels.max()))
        if lowest < 0 or highest >= vocab_size:
            problems.append(f"has tokens outside the target's vocabulary of {vocab_size} in {example.example.id!r}. {remedy}")
            break
    return problems


def _stored(example: DistilledExample) -> tuple[bool, tuple[int, ...], int | None]:
    """What is stored of the target's states: whether its last ones, the inputs of which layers, how many likeliest tokens."""
    top = None if example.top is None else example.top.tokens.shape[1]
    return example.hidden_states is not None, tuple(sorted(example.layers)), top
