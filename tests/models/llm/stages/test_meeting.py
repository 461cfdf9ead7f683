"""The meeting of a head and a stage, in two threads."""

import threading

import pytest
from torch.distributed import HashStore

from outrider.models.llm.stages import meeting
from outrider.models.llm.stages.messages import StageLost


def facts(dtype: str) -> meeting.StageFacts:
    return meeting.StageFacts(machine="here", files=[], values={"target.dtype": dtype})


def test_a_stage_that_differs_is_sent_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine the stage's own message is all that its user sees."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "1")
    store, reasons = HashStore(), []

    def be_stage() -> None:
        stage = meeting.StageMeeting(store)
        stage.greet(facts("float64"))
        assert not stage.needs_digest()
        with pytest.raises(StageLost) as lost:
            stage.connect()
        reasons.append(str(lost.value))
        stage.head.close()
        stage._door._server.close()

    def be_head() -> None:
        with meeting.HeadMeeting(["stage 1"], facts("float32")) as head:
            head.gather(store)
            head.compare("digest")

    thread = threading.Thread(target=be_stage)
    thread.start()
    with pytest.raises(ValueError, match="stage 1 .* has float64 target.dtype"):
        be_head()
    thread.join(10)
    assert len(reasons) == 1
    assert "has float64 target.dtype, and the head has float32" in reasons[0]
    assert "\n" not in reasons[0]


@pytest.mark.parametrize(("local_rank", "rank", "beside"), [("2", "2", True), ("0", "2", False)])
def test_the_stages_on_the_heads_machine_have_equal_ranks(local_rank, rank, beside, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", rank)
    assert meeting.is_beside_head() == beside
