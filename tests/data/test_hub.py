"""The Hub is asked once, and quickly, before the libraries retry for half a minute."""

import logging
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider.data import hub
from outrider.data.raw_records import load_records

REFUSING = "http://127.0.0.1:9"


def test_a_hub_that_refuses_is_asked_twice_and_logged_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", REFUSING)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub._answers.cache_clear()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=f"the Hub .{REFUSING}. can't be reached"):
        load_records("me/data", file="a.json")
    assert time.monotonic() - started < 5
    assert [record.name for record in caplog.records] == ["outrider.data.hub"]
    assert constants.HF_HUB_OFFLINE, "the libraries were to read their caches alone from then on"
    assert not hub.use_hub()


def test_a_cache_that_is_a_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    with pytest.raises(ValueError, match="home is a file, and the cache .*home/hub must be a folder; set HF_HOME"):
        load_records("me/data", file="a.json")
