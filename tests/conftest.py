"""Fixtures of all tests: tiny random models, so that every test runs offline on a CPU."""

import copy
import fcntl
import gc
import math
import os
import signal
import sys
import threading

# Processes that tests start would otherwise compile all modules anew, and so would each run of pytest.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Set these before the imports below: the libraries read them at import time.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["WANDB_MODE"] = "disabled"
# One thread, also in processes that tests start: the models are so small that a second thread slows
# them down.
os.environ["OMP_NUM_THREADS"] = "1"

from . import checked_calls

checked_calls.install()

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import memory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.cli import compose
from outrider.eval.results import figures

from .tiny_models import save_tiny_target


def composed_once(packaged: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what Hydra composes, which takes 60 ms: hundreds of tests compose a few recipes."""
    kept: dict[str, Any] = {}

    def once(layers: Any) -> Any:
        key = repr((layers.packaged, layers.chosen))
        if key not in kept:
            kept[key] = packaged(layers)
        return copy.deepcopy(kept[key])

    return once


torch.set_num_threads(1)
# Each training has accelerate collect garbage twice: a tenth of the tests' time, and no test needs the memory.
memory.gc = SimpleNamespace(collect=int)  # type: ignore[attr-defined]
# No test reads what is left after a power cut.
os.fsync = lambda descriptor: None

compose.packaged = composed_once(compose.packaged)

REPOSITORY = Path(__file__).parents[1]
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{%- else -%}<|user|>{{ message.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@pytest.fixture(autouse=True)
def no_slow_answers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call no answer slow, except in tests with a clock of their own.

    A busy machine disturbs answers of milliseconds, and tests count what was decoded.
    """
    if "clock" not in request.fixturenames:
        monkeypatch.setattr(figures, "SLOW", math.inf)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Set one thread again after each test.

    A recipe sets the number of threads of the whole process. The later tests of that process would
    compete for the cores with the other processes of tests.
    """
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


# A run that nohup or a script has put into the background ignores these signals. So would the processes that it
# starts, and some tests send them these signals.
if threading.current_thread() is threading.main_thread():
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make slow tests of all but the marked number of a test's cases (`quick_cases`), evenly spread."""
    config.stash[COLLECTED] = list(items)
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("quick_cases")
        assert marker is not None
        quick = {place * len(of_test) // marker.args[0] for place in range(marker.args[0])}
        for place, item in enumerate(of_test):
            if place not in quick:
                item.add_marker("slow")


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Return every test that was collected, including those that `-m` deselects."""
    return request.config.stash[COLLECTED]


def pytest_collection_finish() -> None:
    """Freeze the objects of imports and collection, so that garbage collection skips them.

    A collection takes longer than a training of a tiny drafter.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer with a chat template that has generation markers.

    Its 300 tokens are all bytes, the special tokens and a few merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (REPOSITORY / "LICENSE").read_text()  # a text that never changes
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False)
    fast.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT]})
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 1024
    assert len(fast) == 300
    return fast


@pytest.fixture(scope="session")
def tiny_target_dir(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Llama of two layers in float32, with `tiny_tokenizer`.

    The whole session shares it, so tests must not change it.
    """
    directory = tmp_path_factory.mktemp("tiny_target")
    return save_tiny_target(
        directory, LlamaForCausalLM, LlamaConfig, tiny_tokenizer, num_hidden_layers=2, initializer_range=0.2
    )


@pytest.fixture(scope="session")
def once_per_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return a function that fills a folder once, for all processes of a run of pytest.

    The first process that needs the folder fills it, and the others wait. Tests must not change it.
    """
    folder = tmp_path_factory.getbasetemp()
    root = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def fill(name: str, make: Callable[[Path], None]) -> Path:
        directory, done = root / name, root / f"{name}.done"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                directory.mkdir()
                make(directory)
                done.touch()
        return directory

    return fill


@pytest.fixture(scope="session")
def demo_target_dir() -> Path:
    """Return the folder of the target that ships with the project."""
    directory = REPOSITORY / "models" / "demo_target"
    if not (directory / "model.safetensors").exists():
        pytest.skip(f"no demo target in {directory}; make one with scripts/train_demo_target.py")
    return directory


@pytest.fixture(scope="session")
def shared_cases() -> Path:
    """Return the folder of users' inputs that once failed, beside a developer's checkout."""
    directory = REPOSITORY.parent / "shared" / "cases"
    if not directory.is_dir():
        pytest.skip(f"no inputs of users in {directory}")
    return directory


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data sets beside a developer's checkout.

    Users get these from the Hub.
    """
    directory = REPOSITORY.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip(f"no shared data in {directory}")
    return directory
