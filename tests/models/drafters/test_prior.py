"""A measured prior: what the sources of a merge did on other texts, for later texts to start from."""

import torch

from outrider.cli.calibration_stage import measure_prior
from outrider.models.drafters.calibration import MAX_PRIOR, read_prior, write_prior
from outrider.models.drafters.merged import MergedConfig, MergedDrafter

from .test_merged import PROMPTS, build, decode


def test_a_prior_counts_over_all_texts_and_is_where_later_texts_start(target, tmp_path):
    sources = {name: build(name, target) for name in ("draft_model", "prompt_lookup")}
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    few, many = (measure_prior(target, sources, prompts[:count], max_new_tokens=20) for count in (1, 3))
    assert few.sources.keys() == many.sources.keys() == sources.keys()
    assert sum(cell.total for cell in many.sources["draft_model"]) > sum(cell.total for cell in few.sources["draft_model"])
    write_prior(tmp_path, target.identity, many)
    prior = read_prior(tmp_path, target.identity)
    assert prior == many
    drafter = MergedDrafter(sources, MergedConfig(pace="fixed"), prior)
    assert max(total for _, total in drafter.prior_counts.values()) <= MAX_PRIOR
    assert decode(target, drafter, [0])[0] == decode(target, MergedDrafter(sources, MergedConfig(pace="fixed")), [0])[0]
