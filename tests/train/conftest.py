"""Fixtures of tiny shards with texts that a drafter can learn in a second."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from outrider.data.files import sha256_json
from outrider.data.manifest import FORMAT_VERSION, Manifest, TargetIdentity
from outrider.data.shards import label_store, write_shard
from outrider.data.types import UNKNOWN, DistilledExample, Example
from outrider.models.drafters import parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.config import TrainConfig
from outrider.train.run import train

HORIZON = 4
DRAFTER = {"kind": "redrafter", "exit_width": 16, "num_blocks": 1}
TRAIN = {"steps": 6, "batch_size": 4, "learning_rate": 1e-2, "log_every": 1, "checkpoint_every": 1}


def make_example(index: int, vocab_size: int) -> DistilledExample:
    """Make a text in which each token determines the next; its length depends on `index`.

    The target's continuations end with the text, so the number of labels differs by text and by
        depth.
    """
    num_tokens = 12 + 5 * (index % 6)
    tokens = [3 + index]
    while len(tokens) < num_tokens:
        tokens.append((tokens[-1] * 5 + 7) % vocab_size)
    input_ids = torch.tensor(tokens)
    loss_mask = torch.arange(num_tokens) >= 4
    padded = torch.cat([input_ids, torch.full((HORIZON,), UNKNOWN)])
    continuations = torch.stack([padded[1 + d : 1 + d + num_tokens] for d in range(HORIZON)], dim=1)
    continuations[:3] = UNKNOWN
    example = Example(id=f"text-{index}", input_ids=input_ids, loss_mask=loss_mask)
    return DistilledExample(example=example, continuations=continuations)


def write_shards(directory: Path, identity: TargetIdentity, examples: list[DistilledExample], *, per_shard: int = 4) -> Path:
    """Write a complete distillation of the examples."""
    starts = range(0, len(examples), per_shard)
    entries = [write_shard(directory, index, examples[start : start + per_shard]) for index, start in enumerate(starts)]
    first = examples[0] if examples else None
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target=identity,
        horizon=HORIZON,
        features="last_hidden" if first is not None and first.hidden_states is not None else "none",
        feature_layers=[] if first is None else sorted(first.layers),
        features_dtype="bfloat16",
        top_logprobs=None if first is None or first.top is None else first.top.tokens.shape[1],
        target_dtype="torch.float32",
        sampling=None,
        data_sha256="0" * 64,
        plan_sha256="1" * 64,
        max_length=64,
        shards=entries,
        complete=True,
    )
    label_store(directory).save(manifest)
    return directory


@pytest.fixture(scope="session")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32"), torch.device("cpu"))


@pytest.fixture(scope="session")
def examples(target: HFTarget) -> list[DistilledExample]:
    return [make_example(index, target.vocab_size) for index in range(22)]


@pytest.fixture(scope="session")
def shards_dir(target: HFTarget, examples: list[DistilledExample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 22 texts in 6 shards; the whole session shares them, so tests must not change them."""
    return write_shards(tmp_path_factory.mktemp("shards"), target.identity, examples)


@dataclass(frozen=True)
class Run:
    """Folders of one training run."""

    train_dir: Path
    drafter_dir: Path


@pytest.fixture
def run_train(accelerator: Accelerator, target: HFTarget, shards_dir: Path, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that trains into `tmp_path / name`.

    Keywords change TRAIN, `drafter` changes DRAFTER, and `replace_drafter` replaces it.
    """

    def run(
        name: str = "run",
        *,
        drafter: dict[str, Any] | None = None,
        replace_drafter: dict[str, Any] | None = None,
        shards: Path = shards_dir,
        **changes: Any,
    ) -> Run:
        folders = Run(tmp_path / name / "train", tmp_path / name / "drafter")
        config = TrainConfig(**{**TRAIN, **changes})
        spec = parse_drafter(replace_drafter or {**DRAFTER, **(drafter or {})})
        train(config, spec, target, shards, folders.train_dir, folders.drafter_dir, accelerator)
        return folders

    return run


def edit_marker(checkpoint: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's marker, and its digest with them."""
    path = checkpoint / "complete.json"
    content = {**json.loads(path.read_text()), **changes}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": sha256_json(content)}))


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, so that the operating system raises an error as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
