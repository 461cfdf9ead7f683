"""Labels and states from a server that has read the texts, against a pass of the target here."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

pytest.importorskip("openai")  # pip install 'outrider[openai]'

from outrider.data.config import DataConfig
from outrider.data.manifest import Manifest
from outrider.data.shards import read_shard
from outrider.data.types import UNKNOWN, DistilledExample
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill
from outrider.distill.regenerate.engines import openai
from outrider.distill.regenerate.engines.served_states import ServedStates
from outrider.distill.regenerate.run import regenerate
from outrider.models.llm.hf_target import HFTarget

from .completions import running
from .states_server import LAYERS, StatesServer


@pytest.fixture
def server(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesServer]:
    monkeypatch.setattr(openai, "MAX_RETRIES", 0)
    with running(StatesServer(target, tmp_path / "states")) as server:
        yield server


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    path = tmp_path / "chats.jsonl"
    questions = [" ".join(str(7 * number + index) for index in range(1 + number)) for number in range(6)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "1 2"}] for text in questions]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return DataConfig(source="messages", path=str(path), max_length=60)


@pytest.fixture
def config(server: StatesServer) -> DistillConfig:
    return DistillConfig(
        engine="vllm",
        base_url=server.url,
        states_dir=str(server.folder),
        horizon=4,
        features="last_hidden",
        feature_layers=LAYERS,
        shard_examples=4,
        max_new_tokens=20,
    )


def run(config: DistillConfig, data: DataConfig, target: HFTarget, folder: Path) -> list[DistilledExample]:
    accelerator = Accelerator(cpu=True)
    examples = regenerate(config, data, target, folder / "answers", accelerator)
    manifest: Manifest = distill(config, data, target, folder / "distill", accelerator, examples=examples)
    return [example for shard in manifest.shards for example in read_shard(folder / "distill", shard)]


def test_states_and_labels_are_those_of_a_pass_here_and_files_are_deleted(
    config: DistillConfig, data: DataConfig, target: HFTarget, tmp_path: Path, server: StatesServer
) -> None:
    with running(StatesServer(target, server.folder)) as second:
        second.called = Path("/mounted/elsewhere")
        second.lock = server.lock  # both have one target
        served = run(replace(config, base_url=f"{server.url},{second.url}"), data, target, tmp_path / "served")
        assert min(server.num_files, second.num_files) > 2, "two servers share the texts"
    here = run(replace(config, engine="decoder", base_url=None, states_dir=None), data, target, tmp_path / "here")
    assert len(served) == len(here) == 6
    for theirs, ours in zip(served, here, strict=True):
        assert torch.equal(theirs.example.input_ids, ours.example.input_ids)
        for mine, other in ((ours.hidden_states, theirs.hidden_states), *((ours.layers[k], theirs.layers[k]) for k in LAYERS)):
            assert mine is not None
            assert other is not None
            torch.testing.assert_close(other.values.float(), mine.values.float(), atol=1e-2, rtol=1e-2)
        # Where the target agrees with the text nothing is missing.
        known = theirs.continuations != UNKNOWN
        assert torch.equal(theirs.continuations[known], ours.continuations[known])
        assert known.sum() > 0.8 * (ours.continuations != UNKNOWN).sum()
        assert torch.equal(theirs.continuations[:, 0], ours.continuations[:, 0])
    assert not list(server.folder.iterdir())
    manifests = [json.loads((tmp_path / name / "distill" / "manifest.json").read_text()) for name in ("served", "here")]
    assert [manifest["branches"] for manifest in manifests] == [False, True], "labels of states end at a disagreement"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.update(hidden_states=tensors["hidden_states"].flip(1)), "differ from the target's by"),
        (lambda tensors: tensors.update(hidden_states=tensors["hidden_states"][:, 1:].contiguous()), "those of the layers"),
        (lambda tensors: tensors.update(hidden_states=tensors["hidden_states"][1:].contiguous()), "those of the layers"),
        (lambda tensors: tensors.update(hidden_states=tensors["hidden_states"] * torch.nan), "by nan"),
        (lambda tensors: tensors.update(token_ids=tensors["token_ids"] + 1), "isn't of the text that was sent"),
        (lambda tensors: tensors.pop("token_ids"), "isn't of the text that was sent"),
    ],
)
def test_states_of_another_text_or_model_are_refused_before_any_answer(
    config: DistillConfig, data: DataConfig, target: HFTarget, tmp_path: Path, server: StatesServer, spoil: Any, message: str
) -> None:
    server.spoil = spoil
    with pytest.raises(ValueError, match=message) as error:
        run(config, data, target, tmp_path / "run")
    assert server.url in str(error.value)
    assert not list((tmp_path / "run").rglob("*.jsonl")), "before any answer"


def test_no_file_of_states_is_left_after_an_error(
    config: DistillConfig, data: DataConfig, target: HFTarget, tmp_path: Path, server: StatesServer, monkeypatch: Any
) -> None:
    of_file = ServedStates._of_file

    def fails_in_the_end(states: ServedStates, *arguments: Any) -> torch.Tensor:
        if server.num_files > 8:
            time.sleep(1.0)  # the other replies come
            raise ValueError("a fault")
        return of_file(states, *arguments)

    monkeypatch.setattr(ServedStates, "_of_file", fails_in_the_end)
    with pytest.raises(ValueError, match="a fault"):
        run(config, data, target, tmp_path / "run")
    assert server.num_files > 8
    assert not list(server.folder.iterdir())


def test_servers_share_texts_that_are_read_one_by_one(
    config: DistillConfig, data: DataConfig, target: HFTarget, tmp_path: Path, server: StatesServer
) -> None:
    """Each server once took the first text of each batch, and batches of one text had one server."""
    with running(StatesServer(target, server.folder)) as second:
        second.lock = server.lock
        run(replace(config, base_url=f"{server.url},{second.url}", batch_tokens=1), data, target, tmp_path / "run")
    assert min(server.num_files, second.num_files) > 2
    assert abs(server.num_files - second.num_files) <= 1


def test_a_server_that_names_any_other_file_is_refused_and_the_file_stays(
    config: DistillConfig, data: DataConfig, target: HFTarget, tmp_path: Path, server: StatesServer
) -> None:
    precious = tmp_path / "precious.safetensors"
    save_file({"weights": torch.zeros(1)}, precious)

    def elsewhere(reply: dict[str, Any]) -> None:
        if "kv_transfer_params" in reply:
            reply["kv_transfer_params"] = {"hidden_states_path": str(server.folder / ".." / precious.name)}

    server.change = elsewhere
    with pytest.raises(ValueError, match="isn't in distill.states_dir"):
        run(config, data, target, tmp_path / "run")
    assert load_file(precious)["weights"].numel() == 1
    server.change = lambda reply: reply.pop("kv_transfer_params", None)
    with pytest.raises(ValueError, match="gives no hidden states; start vLLM with"):
        run(config, data, target, tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states_dir": None}, "the engine vllm needs the folder"),
        ({"engine": "openai"}, "no other engine does"),
        ({"temperature": 1.0}, "must be 0"),
        ({"label_temperature": 1.0}, "must be 0"),
        ({"base_url": "http://a/v1,b"}, "is not an address"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**{"engine": "vllm", "base_url": "http://a/v1", "states_dir": "states", **options})
