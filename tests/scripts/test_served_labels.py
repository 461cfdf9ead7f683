"""The bench of vLLM's states: on a server of a tiny model it finds both ways equal, and it stops what it starts."""

import fcntl
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("openai")  # pip install 'outrider[openai]'

from outrider.data.types import UNKNOWN, DistilledExample, Example
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from ..distill.completions import running
from ..distill.states_server import LAYERS, StatesServer


@pytest.fixture
def bench(script: Callable[[str], Any]) -> Any:
    return script("bench/served_labels")


@pytest.fixture
def servers(script: Callable[[str], Any]) -> Any:
    return script("bench/vllm_servers")


def test_two_servers_and_the_passes_here_give_the_same(bench, tiny_target_dir, tmp_path, monkeypatch):
    started = list[StatesServer]()

    @contextmanager
    def instead(options: Mapping[str, Any], count: int, threads: int) -> Iterator[list[str]]:
        speculative, transfer = (json.loads(options[f"--{name}-config"]) for name in ("speculative", "kv-transfer"))
        assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [*LAYERS, 2]
        folder = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
        with ExitStack() as stack:
            for _ in range(count):
                target = load_target(TargetConfig(name_or_path=options["--model"], device="cpu"))
                started.append(stack.enter_context(running(StatesServer(target, folder))))
            yield [server.url for server in started]

    monkeypatch.setattr(bench, "running", instead)
    monkeypatch.setattr(sys, "argv", ["served_labels.py"])
    questions, output = tmp_path / "questions.jsonl", tmp_path / "labels.json"
    questions.write_text("".join(json.dumps({"prompt": f"What is {number}?"}) + "\n" for number in range(4)))
    options = {"suite": [f"own={questions}"], "max_length": 100, "max_new_tokens": 12, "rounds": 1, "threads": 1}
    bench.main(target=str(tiny_target_dir), output=output, limit=3, servers=2, **options)
    record = json.loads(output.read_text())
    assert [(row["way"], row["part"]) for row in record["rows"]] == [
        (way, part) for way in ("decoder", "vllm") for part in ("answers", "labels", "both")
    ]
    assert all(0 < row["work_seconds"] < row["seconds"] and 0 < row["share"] <= 1 for row in record["rows"])
    assert all(server.num_files > 2 for server in started)
    assert record["answers"] == record["equal_answers"] == 3
    assert record["labels"] >= record["given_labels"] == record["equal_labels"] > 0
    assert record["states"].keys() == {"last", *map(str, LAYERS)}
    assert all(0 <= layer["largest"] <= layer["of_a_token"] < 1e-5 for layer in record["states"].values())


def example(tokens: list[int], labels: list[int]) -> DistilledExample:
    text = Example(id="a", input_ids=torch.tensor(tokens), loss_mask=torch.ones(len(tokens), dtype=torch.bool))
    return DistilledExample(example=text, continuations=torch.tensor(labels)[:, None])


def test_only_equal_answers_are_compared_and_a_difference_is_found(bench: Any) -> None:
    ours = example([1, 2, 3], [2, 3, UNKNOWN])
    other = replace(ours, example=replace(ours.example, input_ids=torch.tensor([1, 2, 4])))
    theirs = example([1, 2, 3], [2, UNKNOWN, UNKNOWN])
    found, equal = bench.compared({"a": ours, "b": ours, "c": ours}, {"a": theirs, "b": other})
    assert [text.tolist() for text in equal] == [[1, 2, 3]]
    assert (found["answers"], found["equal_answers"]) == (3, 1)
    assert (found["labels"], found["given_labels"], found["equal_labels"]) == (2, 1, 1)
    wrong = replace(theirs, continuations=theirs.continuations + 1)
    assert bench.compared({"a": ours}, {"a": wrong})[0]["equal_labels"] == 0
    assert bench.compared({"a": ours}, {"a": other})[1] == []
    states = torch.tensor([1.0, 10.0, 1.0])[:, None] * torch.tensor([[3.0, 4.0]])
    others = torch.tensor([1.0, 10.0, 1.5])[:, None] * torch.tensor([[3.0, 4.0]])
    assert bench.difference(states, others) == {"largest": 2 / 40, "of_a_token": 0.5}


def is_unlocked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_servers_and_their_processes_are_stopped_after_an_error(servers, tmp_path, monkeypatch):
    program, lock = tmp_path / "python", tmp_path / "lock"
    lock.touch()
    program.write_text(f"""#!{sys.executable}
import fcntl, http.server, subprocess, sys
held = open("{lock}")
fcntl.flock(held, fcntl.LOCK_SH)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[held.fileno()])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
""")
    program.chmod(0o755)
    monkeypatch.setattr(servers, "PYTHON", program)
    with pytest.raises(RuntimeError, match="a fault"), servers.running({}, 2, 1) as urls:  # noqa: PT012
        assert [httpx.get(f"{url}/models", trust_env=False).status_code for url in urls] == [200, 200]
        assert not is_unlocked(lock)
        raise RuntimeError("a fault")
    deadline = time.monotonic() + 10
    while not is_unlocked(lock) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_unlocked(lock), "an engine still runs"


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(servers, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no such layer >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(servers, "PYTHON", program)
    with pytest.raises(RuntimeError, match="no such layer"), servers.running({}, 1, 1):
        pass
