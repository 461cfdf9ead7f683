"""The audits of an evaluation: which answers need one, and what is kept of them when a run is killed."""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..data.files import read_json, write_json
from ..models.llm.hf_target import HFTarget
from .measure.audit import audits
from .measure.bench import Bench
from .measure.environment import recorded_stages, within_memory
from .measure.plan import answer_seed
from .records.names import AUDITS_FILE
from .records.records import EvalRecord, digest_of
from .records.run_files import Audit
from .results.lossless import find_mismatches, is_exact, to_audit

logger = logging.getLogger(__name__)

AUDITED_TOGETHER = 8
"""Answers to a prompt that are audited as the rows of a batch, in low precision. In others few are audited, and each alone,
as it would have been decoded."""
AUDITED_VALUES, MANY = 1 << 28, 1 << 40
"""Most logits that an audit holds together, and tokens without a budget."""


def audit_answers(bench: Bench, records: Sequence[EvalRecord]) -> tuple[dict[str, Audit], list[str]]:
    """Audit the answers that need it (see `to_audit`).

    Returns the audits by `EvalRecord.answer_digest`, and the digests of the unaudited answers. An
    answer is unaudited if memory runs out both beside others and alone. What this run or an earlier one has
    audited is in `AUDITS_FILE`. Raises ValueError if an audit is missing, and this isn't the environment in which
    the run started: another processor rounds differently.
    """
    prompts = {(suite.name, prompt.id): (suite, prompt) for suite in bench.plan.suites for prompt in suite.prompts}
    # 1. Group the answers to the same prompt, but for those that were audited before.
    path, of = bench.file.path.with_name(AUDITS_FILE), digest_of([bench.info.config_digest, bench.info.environment.digest])
    audited = read_audits(path, of)
    unaudited: list[str] = []
    doubtful = to_audit(records, find_mismatches(records), str(bench.target.dtype))
    if any(record.answer_digest not in audited for record in doubtful):
        bench.require_environment()
    groups = defaultdict[tuple[str, float, int], list[EvalRecord]](list)
    for record in doubtful:
        seed = answer_seed(record.seed, record.suite, record.prompt_id, record.turn)
        groups[record.prompt_sha256, record.temperature, seed].append(record)
    with tqdm(total=len(doubtful), desc="audit", unit="answer", disable=not doubtful) as bar:
        for (_, temperature, seed), group in groups.items():
            # 2. Rebuild the prompt, and audit its answers. Several methods may give the same.
            first = group[0]
            turns = bench.plan.prompt_turns(*prompts[first.suite, first.prompt_id], temperature, first.batch_size)
            input_ids = next(turn.input_ids for turn in turns if turn.turn == first.turn)
            options: dict[str, Any] = {"max_new_tokens": bench.config.max_new_tokens, "temperature": temperature, "seed": seed}
            answers = list(dict.fromkeys(tuple(one.token_ids) for one in group if one.answer_digest not in audited))
            length = input_ids.shape[1] + bench.config.max_new_tokens
            found = audit_within_memory(partial(audits, bench.target, input_ids, **options), answers, bench.target, length)

            # 3. Keep the results at once.
            for record in group:
                if record.answer_digest in audited:
                    continue
                if (result := found[tuple(record.token_ids)]) is None:
                    unaudited.append(record.answer_digest)
                    logger.warning(
                        "%s was not audited, because memory ran out. It is not proven to be the target's answer, so its row "
                        "has no speedup. To audit it, run the same command again with more free memory",
                        record.name,
                    )
                    continue
                logger.info("%s: deficit %.4g, noise %.4g", record.key, result.deficit, result.noise)
                audited[record.answer_digest] = result
            write_json(path, {"of": of, "audits": {digest: dataclasses.asdict(result) for digest, result in audited.items()}})
            bar.update(len(group))
    return audited, unaudited


def read_audits(path: Path, of: str) -> dict[str, Audit]:
    """Return what was audited before; nothing if its file is of other records, or can't be read."""
    if not path.exists():
        return {}
    try:
        kept: dict[str, Any] = read_json(path)
        return {digest: Audit(**values) for digest, values in kept["audits"].items()} if kept["of"] == of else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s can't be read (%s), so its answers are audited again", path, error)
        return {}


def audit_within_memory(
    work: Callable[..., list[Audit]], answers: Sequence[tuple[int, ...]], target: HFTarget, length: int
) -> dict[tuple[int, ...], Audit | None]:
    """Audit the answers together, and one by one where memory runs out; None for one that doesn't fit alone.

    `length` is that of the prompt and the longest answer, in tokens.
    """
    found: dict[tuple[int, ...], Audit | None] = {}
    # A memory budget has room for so many tokens, and a target in stages reads one row.
    num_rows = min(AUDITED_TOGETHER, AUDITED_VALUES // (length * target.vocab_size), (target.budget_tokens or MANY) // length)
    num_together = 1 if is_exact(str(target.dtype)) or recorded_stages(target) else max(1, num_rows)
    for start in range(0, len(answers), num_together):
        some = [[*answer] for answer in answers[start : start + num_together]]
        results: Sequence[Audit | None] | None = within_memory(partial(work, answers=some), target)
        if results is None:
            alone = (within_memory(partial(work, answers=[answer]), target) for answer in some)
            results = [one[0] if one else None for one in alone]
        found |= zip(map(tuple, some), results, strict=True)
    return found
