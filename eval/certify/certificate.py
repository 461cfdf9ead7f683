"""The losslessness certificate of a target with drafters, on real prompts."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from ...data.fields import differences
from ...data.files import read_dataclass, write_json
from ...data.suites import PromptSet
from ...models.decoding.acceptance import GreedyAcceptance
from ...models.decoding.loop import generate
from ...models.decoding.pipelined import generate_pipelined
from ...models.decoding.protocols import AcceptanceRule
from ...models.drafters import NullDrafter
from ...models.drafters.oracle import OracleDrafter, StreamingOracle
from ...models.export.package import Certificate, CertificateLine
from ...models.llm.graphed_rule import rule_beside
from ...models.llm.hf_target import HFTarget
from ..measure.audit import audit
from ..measure.environment import recorded_stages
from ..measure.plan import Method, first_turn_ids
from ..measure.timing import Loop, answers_of
from ..records.run_files import Audit
from ..results.lossless import is_exact
from ..results.tables import certificate_cells
from .samples import SAMPLED_TOKENS, certify_sampling

logger = logging.getLogger(__name__)

Check = Callable[[], CertificateLine]
"""A comparison, which returns its line of the certificate."""

BATCH_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Content of the file that keeps the lines of a certificate until it is finished."""

    request: dict[str, Any]
    """What the lines depend on."""
    lines: list[CertificateLine]


def unfinished_file(certificate: Path) -> Path:
    """Return the file that keeps the lines of this certificate until it is finished."""
    return certificate.with_name(f"{certificate.name}.unfinished")


def read_unfinished(path: Path, request: Mapping[str, Any]) -> Unfinished | None:
    """Return what an interrupted run of the same request has kept in the file `path`; None if it kept nothing.

    How linear layers were computed doesn't count: a resumed run computes them as for the lines that are kept.
    """
    if not path.is_file():
        return None
    kept = read_dataclass(Unfinished, path)
    changes = differences(kept.request, json.loads(json.dumps(request)))
    if others := [text for name, text in changes.items() if not name.startswith("environment.linears.")]:
        logger.info("%s is replaced: it differs in %s", path, "; ".join(others))
        return None
    return kept


@torch.inference_mode()
def run_checks(
    checks: Sequence[Check], path: Path, request: Mapping[str, Any], kept: Unfinished | None = None
) -> list[CertificateLine]:
    """Run the checks in order, and keep each line in the file `path`.

    Lines that are `kept` of exactly this request are not computed again. A KeyboardInterrupt is raised
    again, with the number of comparisons that are kept.
    """
    wanted: dict[str, Any] = json.loads(json.dumps(request))
    lines = list[CertificateLine]() if kept is None else list(kept.lines)
    if kept is not None and (changes := differences(kept.request, wanted)):
        logger.info("%s is replaced: it differs in %s", path, "; ".join(changes.values()))
        lines = []
    try:
        for check in tqdm(checks[len(lines) :], desc="certify", unit="check", initial=len(lines), total=len(checks)):
            lines.append(check())
            write_json(path, asdict(Unfinished(request=wanted, lines=lines)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(lines)} of {len(checks)} comparisons are kept in {path}.") from None
    return lines


def decoding_checks(
    target: HFTarget,
    methods: Sequence[Method],
    suites: Sequence[PromptSet],
    *,
    max_new_tokens: int,
) -> list[Check]:
    """List the checks of each method's answers against plain decoding's, and of its samples.

    Greedy answers are compared alone and in batches; with a target in stages, alone, and also those
    of an oracle in the pipelined loop. In float32 and
    float64 the greedy tokens must be equal. In narrower types, and where they differ in a batch, plain
    decoding reads the same text, and every token must be its arg-max or lie within twice the noise that
    the order of computation causes (see `Audit`).
    """
    # 1. Encode the prompts that fit.
    prompts = [first_turn_ids(prompt, target.tokenizer).to(target.device) for suite in suites for prompt in suite.prompts]
    room = target.context_length - max(max_new_tokens, SAMPLED_TOKENS)
    prompts = [prompt for prompt in prompts if prompt.shape[1] <= room]
    if not prompts:
        raise ValueError(f"no prompt fits the target's context window of {target.context_length} tokens; lower max_new_tokens")

    # 2. The checks of the target: an oracle drafts the right answers, so that accepted paths are long,
    # however good the real drafters are. Each row's drafts are right up to a different depth.
    plain = PlainAnswers(target=target, prompts=prompts, max_new_tokens=max_new_tokens)
    most_rows = 1 if recorded_stages(target) else min(BATCH_SIZE, len(prompts))
    form, oracle = _decoded_in(target), "an oracle drafter (drafts the right answers)"

    def tree_oracle(start: int) -> OracleDrafter:
        texts = plain.answers[start : start + most_rows]
        depths = [OracleDrafter.DEPTH - row % OracleDrafter.DEPTH for row in range(start, start + len(texts))]
        return OracleDrafter(texts, depths, target.vocab_size)

    def streaming_oracle(start: int) -> StreamingOracle:
        return StreamingOracle(plain.answers[start], 1 + start % StreamingOracle.MAX_DEPTH, target.vocab_size)

    checks: list[Check] = [partial(plain.certify, f"{oracle}, {form}", tree_oracle, most_rows, generate)]
    if recorded_stages(target):  # adoptions, mismatches and cancellations
        checks.append(partial(plain.certify, f"{oracle}, pipelined, {form}", streaming_oracle, 1, generate_pipelined))
    # 3. Those of each method.
    for method in methods:
        label = f"{method.name}, {form}"
        always: Callable[[int], Any] = partial(lambda drafter, _: drafter, method.drafter)
        checks += [partial(plain.certify, label, always, size, method.loop) for size in sorted({1, most_rows})]
        checks.append(partial(certify_sampling, label, target, method, prompts))
    return checks


@dataclass(frozen=True, kw_only=True)
class PlainAnswers:
    """Prompts, and plain decoding's answers to them, which all checks share."""

    target: HFTarget
    prompts: Sequence[torch.Tensor]
    max_new_tokens: int
    _audits: dict[tuple[int, tuple[int, ...]], Audit] = field(default_factory=dict)
    """Audits by prompt and answer: most methods give the same answer."""

    @cached_property
    def answers(self) -> list[list[int]]:
        """Plain decoding's answers, one for each prompt; decoded when they are first read."""
        decoded = [self.decode(NullDrafter(), index, 1, GreedyAcceptance()) for index in range(len(self.prompts))]
        return [answers[0] for answers, _ in decoded]

    @cached_property
    def rule(self) -> AcceptanceRule:
        """The rule of all checks, as an evaluation uses it beside this target."""
        return rule_beside(self.target, GreedyAcceptance())

    def certify(self, label: str, drafter_of: Callable[[int], Any], batch_size: int, loop: Loop) -> CertificateLine:
        """Decode all prompts greedily, in batches, and compare the answers with plain decoding's.

        `drafter_of` returns the drafter of the batch that begins with a prompt.
        """
        starts = range(0, len(self.prompts), batch_size)
        decoded = [self.decode(drafter_of(start), start, batch_size, self.rule, loop) for start in starts]
        together = "" if batch_size == 1 else f", {batch_size} prompts at a time"
        answers = [answer for answers, _ in decoded for answer in answers]
        return self.compare(f"{label}, greedy{together}", answers, sum(accepted for _, accepted in decoded), batch_size)

    def decode(
        self, drafter: Any, start: int, num_rows: int, rule: AcceptanceRule, loop: Loop = generate
    ) -> tuple[list[list[int]], int]:
        """Decode some prompts together, greedily; return the answers and the number of accepted drafts."""
        rows = [prompt[0] for prompt in self.prompts[start : start + num_rows]]
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "stop_ids": self.target.stop_ids}
        steps = list(loop(self.target, drafter, rule, rows, **options))
        return answers_of(steps), sum(step.num_drafted for step in steps)

    def audit(self, index: int, answer: list[int]) -> Audit:
        """Audit an answer to a prompt (see `audit`), once for equal answers."""
        key = (index, tuple(answer))
        if key not in self._audits:
            self._audits[key] = audit(self.target, self.prompts[index], answer, max_new_tokens=self.max_new_tokens)
        return self._audits[key]

    def compare(self, label: str, answers: Sequence[list[int]], num_accepted: int, batch_size: int = 1) -> CertificateLine:
        """Compare answers with plain decoding's, which decodes each prompt alone."""
        dtype = str(self.target.dtype)
        exact, may_round = is_exact(dtype), not is_exact(dtype, batch_size=batch_size)
        num_bad, worst, num_rounded = 0, 0.0, 0
        for index, answer in enumerate(answers):
            if exact and answer == self.answers[index]:
                continue
            if may_round:
                margin = self.audit(index, answer)
                num_bad += not margin.within_noise
                num_rounded += margin.within_noise
                worst = max(worst, margin.deficit / margin.noise if margin.noise else margin.deficit)
            else:
                num_bad += 1
        equal = f"{num_bad} answers differ" + (f", and {num_rounded} within rounding" if exact and num_rounded else "")
        beyond = f"{num_bad} answers beyond the noise; worst deficit {worst:.2g} of it"
        return CertificateLine(
            subject=f"{label}: {sum(map(len, answers))} tokens, {num_accepted} of them accepted drafts",
            method="the tokens of plain decoding" if exact else "every token the arg-max, within twice the noise",
            num_cases=len(self.prompts),
            result=equal if exact else beyond,
            passed=not num_bad,
        )


def certificate_of(lines: Sequence[CertificateLine], subject: Mapping[str, Any]) -> Certificate:
    """Return the certificate of a subject: it passes if every line holds.

    Its false-alarm rate bounds the probability that it fails although everything is sound: the sum over all
    tests (Bonferroni).
    """
    rate = sum(line.false_alarm_rate for line in lines)
    return Certificate(passed=all(line.passed for line in lines), false_alarm_rate=rate, lines=list(lines), **subject)


def certificate_table(lines: Sequence[CertificateLine]) -> Table:
    """Format the certificate for a terminal."""
    table = Table(*certificate_cells(lines[0]))
    for line in lines:
        table.add_row(*certificate_cells(line).values(), style=None if line.passed else "bold red")
    return table


def _decoded_in(target: HFTarget) -> str:
    """Describe the target's type, and its form unless it is the plain one."""
    dtype = str(target.dtype).removeprefix("torch.")
    return dtype if target.form == "eager" else f"{dtype} {target.form}"
