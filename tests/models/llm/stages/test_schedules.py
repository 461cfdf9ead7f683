"""Pipelined speculation on real stages, whoever moves next: the tokens of the whole target.

The schedules are those of `tests/models/decoding/test_pipelined.py`. There the stages are toys; here
they have layers, keys and values, and a cancellation may land between two layers.
"""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from outrider.data.manifest import TargetIdentity
from outrider.models.decoding import generate
from outrider.models.decoding.pipelined import generate_pipelined
from outrider.models.decoding.protocols import AsyncTarget
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.stages.messages import Link, Work
from outrider.models.llm.stages.stage import Stage
from outrider.models.llm.stages.staged_target import StagedTarget

from ...decoding.schedules import FAULTS, NO_FAULTS, Faults, Scheduler
from ...decoding.streaming_toys import DRAFTERS, NUM_TOKENS, POLICIES, DialledDrafter, Schedule, options, schedules
from .inline import InlineLink, in_stages

VOCAB = 6
STAGE_LAYERS = {1: [5], 2: [2, 3], 3: [1, 3, 1], 5: [1] * 5}


class ScheduledLink(InlineLink):
    """Stages that move in an order that follows from a seed."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self.num_skipped = self.num_aborted = self.num_adopted = 0
        self.schedule(0, NO_FAULTS)

    def schedule(self, seed: int, faults: Faults) -> None:
        """Begin another order; what is under way stays there."""
        self.scheduler = Scheduler(seed, faults, self.inboxes, self.cancelled, self.advance)

    def send(self, work: Work) -> None:
        super().send(work)
        self.num_adopted += len(work.keep or ()) > work.num_committed
        self.scheduler.move_some()

    def has_answer(self) -> bool:
        self.scheduler.move_some()
        return super().has_answer()

    def receive(self) -> Work:
        self.scheduler.wait()
        work = super().receive()
        self.scheduler.deliver_late(work.number)
        return work

    def cancel(self, numbers: Sequence[int]) -> None:
        self.scheduler.cancel(numbers)

    def advance(self, index: int) -> None:
        """Let a stage handle its oldest message. Cancellations may land before each of its layers."""
        num_looks = 0

        def is_cancelled(number: int) -> bool:
            nonlocal num_looks
            num_looks += 1
            if self.scheduler.on_the_way and self.scheduler.random.random() < 0.3:
                late, stage = self.scheduler.on_the_way.pop()
                self.cancelled[stage].add(late)
            return number in self.cancelled[index]

        work = self.inboxes[index].popleft()
        result = self.stages[index].handle(work, is_cancelled)
        self.num_skipped += result.hidden is None
        self.num_aborted += result.hidden is None and num_looks > 1
        self.inboxes[index + 1].append(result)


@cache
def whole() -> HFTarget:
    """Return a target of five layers, some with a short window, whose texts differ and vary."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    options = {"tie_word_embeddings": False, "query_pre_attn_scalar": 1, "max_position_embeddings": 64, **sizes}
    config = Gemma3TextConfig(vocab_size=VOCAB, num_hidden_layers=5, layer_types=kinds, sliding_window=6, **options)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(2)
    model = Gemma3ForCausalLM(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    digests = {"weights_sha256": "0", "config_sha256": "", "tokenizer_sha256": "", "quantization": ""}
    return HFTarget(model, None, TargetIdentity(name="tiny", revision=None, hidden_size=16, vocab_size=VOCAB, **digests))


@cache
def staged(num_stages: int) -> StagedTarget:
    """Return the target in stages. One target decodes all texts, with runs of earlier ones under way."""
    target = in_stages(whole(), STAGE_LAYERS[num_stages])
    assert isinstance(target.link, InlineLink)
    target.link = ScheduledLink(target.link.stages)
    return target


@cache
def plain(prompt: tuple[int, ...], is_sampled: bool) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    steps = generate(whole(), NullDrafter(), prompts=ids, max_new_tokens=2 * NUM_TOKENS, **options(is_sampled))
    return tuple(token for step in steps for token in step.tokens[0])


def decode(schedule: Schedule) -> list[int]:
    target, seed = staged(schedule.num_stages), schedule.seed
    assert isinstance(target.link, ScheduledLink)
    target.link.schedule(seed, FAULTS[seed // 7 % len(FAULTS)])
    steps = generate_pipelined(
        target,
        DialledDrafter(plain(schedule.prompt, schedule.is_sampled), seed=seed, vocab=VOCAB, **DRAFTERS[schedule.drafter]),
        prompts=torch.tensor([schedule.prompt]),
        max_new_tokens=schedule.max_new_tokens,
        speculation=POLICIES[seed // 3 % len(POLICIES)](seed),
        **options(schedule.is_sampled),
    )
    return [token for step in steps for token in step.tokens[0]]


def check(count: int) -> None:
    links = [staged(num_stages).link for num_stages in STAGE_LAYERS]
    before = [(link.num_skipped, link.num_aborted, link.num_adopted) for link in links]
    texts = set()
    visited = 0
    for schedule in schedules(count):
        text = plain(schedule.prompt, schedule.is_sampled)
        assert decode(schedule) == [*text[: schedule.max_new_tokens]], schedule
        texts.add(text)
        visited += 1
    assert visited >= count
    assert len(texts) > 8
    after = [(link.num_skipped, link.num_aborted, link.num_adopted) for link in links]
    changes = [[now - then for now, then in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)]
    skipped, aborted, adopted = map(sum, zip(*changes, strict=True))
    assert skipped > count
    assert aborted > count / 20
    assert adopted > count / 3


def test_a_staged_target_is_an_asynchronous_target() -> None:
    assert isinstance(staged(2), AsyncTarget)
    assert isinstance(staged(2).link, Link)
    assert staged(2).max_runs == 3


@pytest.mark.parametrize("count", [12, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_no_schedule_of_real_stages_changes_a_token(count: int) -> None:
    check(count)
