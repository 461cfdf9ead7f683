"""`outrider data`: check folders of distilled data, and draw suites from conversations."""

import sys
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..data.config import SOURCES, TRAFFIC
from ..data.fields import OPTIONS, PositiveInt, Seed, one_of

DRAWN_FROM = 25
"""Conversations among which `outrider data suite` looks for each prompt: many of a log may repeat each other."""


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


@dataclass(kw_only=True, config=OPTIONS)
class SuiteOptions:
    """Options of `outrider data suite`."""

    paths: Annotated[list[str], Field(min_length=1)]
    """Conversations: files, folders, patterns, or data sets of the Hub."""
    output: Path
    """The file of prompts to write (.jsonl); its name is the suite's."""
    source: Annotated[str, one_of(*SOURCES)] = TRAFFIC
    """Form of the records (data.source)."""
    count: PositiveInt = 40
    """Prompts to draw."""
    seed: Seed = 0
    """Seed of the choice."""

    POSITIONAL: ClassVar = ("paths",)


def suite_command(options: SuiteOptions) -> None:
    """Draw a suite of prompts from conversations, for evaluations; what is private in logged traffic is replaced.

    Of prompts that nearly repeat each other one is kept. A run that evaluates the suite keeps its prompts out of the
    training.
    """
    import json

    from ..data.config import DataConfig, DataSource
    from ..data.files import atomic_write_text
    from ..data.questions import draw_suite
    from ..data.sources import describe_drops, load_conversations

    if options.output.exists():
        raise ValueError(f"output is {options.output}, which exists; remove it, or choose another name")
    if options.output.suffix != ".jsonl":
        raise ValueError(f"output is {options.output}; give the name of a .jsonl file")
    sources = [DataSource(source=options.source, path=path) for path in options.paths]
    data = DataConfig(sources=sources, limit=DRAWN_FROM * options.count, seed=options.seed)
    conversations, dropped = load_conversations(data, unanswered=True)
    records, num_repeated = draw_suite(conversations, options.count, seed=options.seed)
    if not records:
        raise ValueError(f"no conversation of {', '.join(options.paths)} is a prompt: user and assistant must take turns")
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    atomic_write_text(options.output, text)
    few = "" if len(records) == options.count else f" ({options.count} were wanted)"
    print(f"{options.output} has {len(records)} prompts{few}.")
    print(f"Left out: {num_repeated} that nearly repeat others; {describe_drops(dropped)}.")
    name = options.output.stem
    print(f"In a recipe, keep them out of the training: eval.suites=[{{name: {name}, path: {options.output}}}]")
