"""`generate` of a packaged drafter, against transformers' own `generate`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.models.drafters import decoder_layer
from outrider.models.export.bound_drafters import ATTRIBUTE
from outrider.models.export.custom_generate import find_parts, generate
from outrider.models.llm import tree_attention

from .conftest import BATCH, MASK, PROMPT

KINDS = ("redrafter", "medusa", "mtp", "eagle", "eagle3", "block", "draft_model")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_that_of_plain_generate(model, package_dirs, kind):
    inputs = {"input_ids": BATCH, "attention_mask": MASK}
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    assert torch.equal(generate(model, drafter=str(package_dirs[kind]), **inputs, do_sample=False, max_new_tokens=20), plain)


def test_a_packages_code_leaves_the_librarys_attention_in_place(model, package_dirs):
    """The package may be of another version, and transformers has one table of functions by name."""
    model.generate(
        PROMPT, custom_generate=str(package_dirs["eagle"]), trust_remote_code=True, do_sample=False, max_new_tokens=4
    )
    copies = [name for name in sys.modules if name.endswith((".llm_tree_attention", ".drafters_decoder_layer"))]
    assert len(copies) >= 2
    assert ALL_ATTENTION_FUNCTIONS[tree_attention.IMPLEMENTATION].__module__ == tree_attention.__name__
    assert ALL_ATTENTION_FUNCTIONS[decoder_layer.IMPLEMENTATION].__module__ == decoder_layer.__name__


def test_drafts_are_accepted_in_these_tests(model, package):
    """Otherwise all of them would pass for a drafter that is never used."""
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    # The first call probes whether the model can read trees.
    generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=2)
    calls.clear()
    tokens = generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=20)
    assert tokens.shape[1] == 25
    assert len(calls) < 8


def test_a_finished_row_is_padded_as_in_transformers(model, package):
    """A stop token is in the middle of an accepted path, and other rows continue."""
    free = model.generate(input_ids=BATCH, attention_mask=MASK, max_new_tokens=20)
    stop = int(free[0, 8])  # the first row's fourth new token
    options = {"input_ids": BATCH, "attention_mask": MASK, "eos_token_id": [stop, 299], "pad_token_id": 0, "max_new_tokens": 20}
    plain = model.generate(**options)
    assert (plain == 0).sum() > (BATCH == 0).sum()
    assert torch.equal(generate(model, drafter=package, **options), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 11},
        {},  # transformers' own default, of 20 tokens
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False)},
        {"max_new_tokens": 1},
    ],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_length_of_an_answer_equals_that_of_plain_generate(model, package, options):
    plain = model.generate(input_ids=PROMPT, **options)
    assert torch.equal(generate(model, drafter=package, input_ids=PROMPT, **options), plain)


def test_the_prompt_may_be_positional_and_the_result_a_dictionary(model, package):
    output = generate(model, PROMPT, drafter=package, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(PROMPT, max_new_tokens=5))


class StopsAfter(StoppingCriteria):
    """Criterion that ends each row at its first token that is divisible by a number."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.divisor == 0


def test_stopping_criteria_end_rows_within_an_accepted_path(model, package):
    options = {"input_ids": BATCH, "attention_mask": MASK, "max_new_tokens": 30, "pad_token_id": 0}
    criteria = StoppingCriteriaList([StopsAfter(4)])
    plain = model.generate(**options, stopping_criteria=criteria)
    assert plain.shape[1] < 35
    assert torch.equal(generate(model, drafter=package, **options, stopping_criteria=criteria), plain)


class Witness(StoppingCriteria):
    """Criterion that records its inputs, and ends a row where `ends(row, answer's length)`."""

    def __init__(self, ends: Callable[[int, int], bool] = lambda row, length: False) -> None:
        self.ends = ends
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert scores is None
        self.seen.append(input_ids.tolist())
        length = input_ids.shape[1] - BATCH.shape[1]
        return torch.tensor([self.ends(row, length) for row in range(len(input_ids))])


# The rows of the first accept equal numbers of tokens, those of the second don't.
@pytest.mark.parametrize(("kind", "eos"), [("draft_model", {"eos_token_id": [88, 299]}), ("redrafter", {"eos_token_id": None})])
def test_stopping_criteria_see_the_whole_batch_token_by_token(model, package_dirs, kind, eos):
    """As in transformers, ended rows continue, or are padded if there are stop tokens."""
    if eos["eos_token_id"] is None:
        model.generation_config.eos_token_id = None
    options = {"input_ids": BATCH, "attention_mask": MASK, "max_new_tokens": 14, "pad_token_id": 0, **eos}
    plain, drafting = (Witness(lambda row, length: row == 1 and length == 3) for _ in range(2))
    tokens = model.generate(**options, stopping_criteria=StoppingCriteriaList([plain]))
    drafted = generate(model, drafter=str(package_dirs[kind]), **options, stopping_criteria=StoppingCriteriaList([drafting]))
    assert torch.equal(drafted, tokens)
    assert len(drafting.seen) > 5
    assert drafting.seen == plain.seen


def test_max_time_ends_all_rows_at_the_same_position(model, package_dirs):
    options = {"input_ids": BATCH, "attention_mask": MASK, "max_new_tokens": 200, "eos_token_id": 299, "pad_token_id": 0}
    tokens = generate(model, drafter=str(package_dirs["redrafter"]), **options, max_time=1e-9)
    assert torch.equal(tokens, model.generate(**options, max_time=1e-9))
    assert tokens.shape[1] == BATCH.shape[1] + 1


def test_a_criterion_with_values_for_other_rows_is_an_error(model, package):
    class Two(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(2, dtype=torch.bool)

    criteria = StoppingCriteriaList([Two()])
    with pytest.raises(ValueError, match=r"\(Two\) return \(2,\) values for 1 rows"):
        generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=3, stopping_criteria=criteria)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_receives_the_values_of_plain_generate(model, package):
    plain, drafting = Recorder(), Recorder()
    model.generate(input_ids=PROMPT, max_new_tokens=9, streamer=plain)
    generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=9, streamer=drafting)
    assert drafting.values == plain.values
    assert drafting.ended
    with pytest.raises(ValueError, match="a streamer takes one text, but there are 3 prompts"):
        generate(model, drafter=package, input_ids=BATCH, attention_mask=MASK, max_new_tokens=9, streamer=Recorder())


def test_a_seeds_text_does_not_depend_on_other_rows_or_the_drafter(model, package_dirs):
    def sample(drafter: str, **inputs: Any) -> list[list[int]]:
        options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 12, "seed": 5}
        return generate(model, drafter=drafter, **inputs, **options)[:, 5:].tolist()

    folder = str(package_dirs["draft_model"])
    batch = sample(folder, input_ids=BATCH, attention_mask=MASK)
    for other in (str(package_dirs["medusa"]), "prompt_lookup", f"{folder}+prompt_lookup"):
        assert sample(other, input_ids=BATCH, attention_mask=MASK) == batch, other
    assert sample(folder, input_ids=BATCH[:1], attention_mask=MASK[:1]) == batch[:1]
    assert len({tuple(row) for row in batch}) == 3


def test_sampling_repeats_with_the_same_generator_or_global_seed(model, package):
    options = {"input_ids": PROMPT, "do_sample": True, "max_new_tokens": 12}
    first, second = (generate(model, drafter=package, **options, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        third = generate(model, drafter=package, **options)
        del vars(model)[ATTRIBUTE]  # loading the drafter uses no random numbers
        torch.manual_seed(3)
        assert torch.equal(generate(model, drafter=package, **options), third)
    state = torch.get_rng_state()
    generate(model, drafter=package, **options | {"do_sample": False})
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding uses no random numbers"
    with pytest.raises(ValueError, match="a seed and a generator"):
        generate(model, drafter=package, **options, seed=1, generator=torch.Generator())


def test_several_samples_of_a_prompt_are_different(model, package):
    rows = generate(model, drafter=package, input_ids=PROMPT, do_sample=True, num_return_sequences=3, max_new_tokens=12, seed=0)
    assert rows.shape[0] == 3
    assert len({tuple(row) for row in rows.tolist()}) == 3


def test_a_compiled_model_is_not_recompiled_for_every_tree(model, package_dirs):
    """The model was compiled before hooks for hidden states were added."""
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    plain = model.generate(input_ids=PROMPT, max_new_tokens=8)
    model.get_decoder().layers[1].compile(backend=backend)
    with torch.no_grad():
        model(PROMPT)
    assert compilations
    compilations.clear()
    assert torch.equal(generate(model, drafter=str(package_dirs["eagle3"]), input_ids=PROMPT, max_new_tokens=8), plain)
    assert not compilations


def test_options_of_the_drafter_reach_it(model, package_dirs):
    options = {"input_ids": PROMPT, "max_new_tokens": 8, "drafter_options": {"beam_width": 5, "beam_length": 2}}
    tokens = generate(model, drafter=str(package_dirs["redrafter"]), **options)
    assert torch.equal(tokens, model.generate(input_ids=PROMPT, max_new_tokens=8))
    (bound,) = vars(model)[ATTRIBUTE].by_name.values()
    drafter = bound.drafter
    assert (drafter.config.beam_width, drafter.config.beam_length) == (5, 2)


def test_code_outside_of_a_package_needs_the_drafter_argument(model):
    with pytest.raises(ValueError, match="give drafter=FOLDER"):
        generate(model, input_ids=PROMPT, max_new_tokens=5)


def test_packed_weights_change_no_token_here(model, package):
    tokens = generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=20, fast_linears=True)
    assert torch.equal(tokens, model.generate(input_ids=PROMPT, max_new_tokens=20))


def test_the_codes_revision_is_not_passed_on_for_another_drafter(monkeypatch):
    received: dict[str, object] = {}

    def resolve(name: str, **options: object) -> Path:
        received.update(options)
        return Path(name)

    monkeypatch.setattr("outrider.models.export.custom_generate.resolve_drafter", resolve)
    monkeypatch.setattr("outrider.models.drafters.saved.parts.resolve_drafter", lambda name, **_: Path(name))
    with pytest.raises(ValueError, match="user/drafter holds no drafter"):
        find_parts("user/drafter", {"revision": "v2", "token": "x"})
    assert received == {"token": "x"}


def test_a_name_and_a_merge_give_the_text_of_plain_generate(model, package):
    inputs = {"input_ids": BATCH, "attention_mask": MASK}
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    for drafter in ("prompt_lookup", f"{package}+prompt_lookup", f"prompt_lookup+{package}"):
        assert torch.equal(generate(model, drafter=drafter, **inputs, do_sample=False, max_new_tokens=20), plain), drafter
    fixed = {"drafter": f"{package}+prompt_lookup", "drafter_options": {"pace": "fixed", "tree_nodes": 5}}
    assert torch.equal(generate(model, **fixed, **inputs, do_sample=False, max_new_tokens=20), plain)
