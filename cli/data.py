"""`outrider data`: check folders of distilled data."""

import sys
from pathlib import Path
from typing import ClassVar

from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS


@dataclass(kw_only=True, config=OPTIONS)
class VerifyOptions:
    """Options of `outrider data verify`."""

    directory: Path
    """A folder that the stage distill wrote: RUN/distill or RUN/answers."""
    target: str | None = None
    """Check that the data is of this target: a directory or Hub id."""

    POSITIONAL: ClassVar = ("directory",)


def verify_command(options: VerifyOptions) -> None:
    """Read a folder of distilled data completely, and print each problem.

    Exits with status 1 if there is a problem.
    """
    directory, target = options.directory, options.target
    # 1. Check the argument. A run's folder has two folders of data: the user must choose one.
    from ..data.manifest import MANIFEST_FILE, TargetIdentity
    from ..data.shards import label_store
    from ..distill.regenerate.answers import answer_store, is_answers

    if not directory.is_dir():
        raise ValueError(
            f"{directory} {'is no folder' if directory.exists() else 'does not exist'}; name a folder that the stage "
            "distill wrote"
        )
    stages = [stage for stage in ("distill", "answers") if (directory / stage / MANIFEST_FILE).exists()]
    if stages and not (directory / MANIFEST_FILE).exists():
        raise ValueError(f"{directory} is a run's folder; verify {' and '.join(str(directory / stage) for stage in stages)}")

    # 2. Read all shards.
    identity: TargetIdentity
    if is_answers(directory):
        answers, problems = answer_store(directory).find_damage()
        identity, num_tokens = answers.target, sum(entry.counts.num_tokens for entry in answers.shards)
        num_answers = sum(entry.counts.num_answers for entry in answers.shards)
        summary = f"{len(answers.shards)} shards are whole: {num_answers} answers of {num_tokens} tokens"
    else:
        manifest, problems = label_store(directory).find_damage()
        identity, num_bytes = manifest.target, sum(shard.num_bytes for shard in manifest.shards)
        summary = (
            f"{len(manifest.shards)} shards are whole: {sum(len(shard.ids) for shard in manifest.shards)} examples, "
            f"{manifest.num_tokens} tokens, {manifest.num_labels} labelled positions of horizon {manifest.horizon}, "
            f"{num_bytes / 1e6:.1f} MB"
        )

    # 3. Compare the targets, and report.
    if target is not None:
        from ..models.llm.loading import load_target

        if changes := identity.differences(load_target(target).identity):
            problems.append(
                f"the data is of the target {identity.name!r} (revision {identity.revision}), not of {target}; different: "
                f"{'; '.join(changes)}"
            )
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise SystemExit(1)
    print(f"{summary}, of the target {identity.name}")
