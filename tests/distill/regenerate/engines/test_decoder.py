"""Our decoder as an engine: in any batch and with any drafter it gives transformers' text."""

from collections.abc import Sequence

import pytest
import torch

from outrider.distill.config import DistillConfig
from outrider.distill.regenerate.engine import Answer, Limits, Request
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.distill.regenerate.engines.registry import open_engine
from outrider.models.decoding import Sampling
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.drafters.saved.loading import load_drafter
from outrider.models.llm.hf_target import HFTarget

GREEDY = Sampling(temperature=0.0)


def answers(engine: DecoderEngine, requests: Sequence[Request]) -> dict[str, Answer]:
    all_answers = list(engine.answer(requests))
    assert sorted(answer.id for answer in all_answers) == sorted(request.id for request in requests)
    return {answer.id: answer for answer in all_answers}


def texts(answers_by_id: dict[str, Answer]) -> dict[str, tuple[list[int], bool]]:
    return {id: (answer.tokens.tolist(), answer.cut) for id, answer in answers_by_id.items()}


def reference(target: HFTarget, request: Request, room: int) -> tuple[list[int], bool]:
    """Answer one request with transformers' `generate`."""
    prompt = request.prompt_ids[None]
    stops = list(target.stop_ids)
    output = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=room, eos_token_id=stops, pad_token_id=0
    )
    tokens = output[0, prompt.shape[1] :].tolist()
    return tokens, tokens[-1] not in stops


def test_greedy_answers_with_stops_and_cuts_are_those_of_transformers(target, requests, limits):
    engine = DecoderEngine(target, NullDrafter(), sampling=GREEDY, limits=limits, batch_size=4)
    actual = texts(answers(engine, requests))
    for request in requests:
        assert actual[request.id] == reference(target, request, limits.room(len(request.prompt_ids)))
    assert {cut for _, cut in actual.values()} == {True, False}


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_neighbours(target, requests, limits):
    engine = DecoderEngine(target, NullDrafter(), sampling=Sampling(temperature=1.0, top_p=0.9), limits=limits, batch_size=5)
    together = texts(answers(engine, requests))
    alone = {request.id: texts(answers(engine, [request]))[request.id] for request in requests}
    assert together == alone == texts(answers(engine, requests[::-1]))
    reseeded = [Request(id=request.id, prompt_ids=request.prompt_ids, seed=request.seed + 1) for request in requests]
    assert texts(answers(engine, reseeded)) != together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_changes_the_number_of_passes_and_no_token(target, requests, limits, temperature, monkeypatch):
    sampling = Sampling(temperature=temperature)
    passes: list[int] = []
    verify = HFTarget.verify
    monkeypatch.setattr(HFTarget, "verify", lambda self, *args, **options: passes.append(1) or verify(self, *args, **options))

    def decode(drafter: NullDrafter | OracleDrafter) -> tuple[dict[str, tuple[list[int], bool]], int]:
        passes.clear()
        engine = DecoderEngine(target, drafter, sampling=sampling, limits=limits, batch_size=len(requests))
        return texts(answers(engine, requests)), len(passes)

    plain, num_plain = decode(NullDrafter())
    ordered = sorted(requests, key=lambda request: (-len(request.prompt_ids), request.id))
    # The oracle needs tokens beyond the end of an answer.
    known = [plain[request.id][0] + [0] * limits.max_new_tokens for request in ordered]
    drafted, num_drafted = decode(OracleDrafter(known, [3, 2] * len(known), target.vocab_size))
    assert drafted == plain
    assert num_drafted < 0.6 * num_plain


def test_requests_longer_than_the_drafters_context_are_decoded_without_it(target, requests, limits):
    read: list[int] = []

    class Recorder(NullDrafter):
        def init_state(self, prompts, prefill, *, max_new_tokens):  # type: ignore[no-untyped-def]
            read.extend(prompts.lengths)
            return super().init_state(prompts, prefill, max_new_tokens=max_new_tokens)

    engine = DecoderEngine(target, Recorder(), sampling=GREEDY, limits=limits, batch_size=3, drafter_context=40)
    plain = DecoderEngine(target, NullDrafter(), sampling=GREEDY, limits=limits, batch_size=3)
    assert texts(answers(engine, requests)) == texts(answers(plain, requests))
    lengths = [len(request.prompt_ids) for request in requests]
    assert sorted(read) == sorted(length for length in lengths if length + limits.room(length) <= 40)
    assert 0 < len(read) < len(requests)


def test_a_trained_drafter_from_a_folder_changes_no_token(target, requests, limits, tmp_path):
    drafter = build_drafter(
        parse_drafter({"kind": "redrafter", "exit_width": 16, "num_blocks": 1, "head_init": "random"}), target
    )
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    with open_engine(DistillConfig(engine="decoder", decode_batch_size=4), target, limits) as engine:
        plain = {answer.id: answer.tokens.tolist() for answer in engine.answer(requests)}
    for name, settings in (
        (str(tmp_path / "drafter"), {"beam_width": 2, "beam_length": 3}),
        ("prompt_lookup", {}),
        (f"{tmp_path / 'drafter'}+prompt_lookup", {}),
    ):
        loaded = load_drafter(name, target, **settings)
        with open_engine(DistillConfig(engine="decoder", drafter=name), target, limits, loaded) as engine:
            assert {answer.id: answer.tokens.tolist() for answer in engine.answer(requests)} == plain, name


def test_a_target_without_a_stop_token_is_refused(target: HFTarget, limits: Limits) -> None:
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="has no stop token"), open_engine(DistillConfig(engine="decoder"), target, limits):
        pass
