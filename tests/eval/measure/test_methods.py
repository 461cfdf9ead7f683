"""Names of methods in the tables."""

from pathlib import Path

from huggingface_hub import constants

from outrider.eval.measure.methods import _distinct_parts


def test_a_low_rank_change_has_the_name_of_its_folder_not_of_the_cache_that_it_is_merged_in():
    base, change = Path("/runs/base/drafter"), Path(constants.HF_ASSETS_CACHE, "outrider/low_rank/0d1e2f/mine")
    assert _distinct_parts([change, base]) == {base: "", change: "mine"}
    others = [Path("/runs/low_rank/a/drafter"), Path("/runs/low_rank/b/drafter")]  # a folder of one's own
    assert _distinct_parts([*others, change]) == {others[0]: "a", others[1]: "b", change: "mine"}
