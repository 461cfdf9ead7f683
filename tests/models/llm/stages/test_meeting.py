"""What the processes of a target in stages compare before they load anything."""

import pytest

from outrider.models.llm.stages.loading import FILES, differences, is_beside_head


def test_versions_and_options_that_differ_are_named_with_both_values() -> None:
    head = {"version of outrider": "0.2.0", "target.dtype": "float32", "weight files": "", FILES: "here"}
    assert not differences({**head, FILES: "there"}, head)
    text = differences({"version of outrider": "0.1.0", "weight files": "one", FILES: "here"}, head)
    assert "has 0.1.0 version of outrider, and the head has 0.2.0" in text
    assert "has no target.dtype, and the head has float32" in text
    assert "has one weight files, and the head has none" in text


@pytest.mark.parametrize(("local_rank", "rank", "beside"), [("2", "2", True), ("0", "2", False)])
def test_the_stages_on_the_heads_machine_have_equal_ranks(local_rank, rank, beside, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", rank)
    assert is_beside_head() == beside
