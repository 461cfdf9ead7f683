"""Loading of a target in stages: each process reads its part only.

Process 0 of the launch is the head: embeddings, final norm, output embeddings, drafter. Process k
has the layers of stage k. Everything that can be wrong is an error of the head, before weights are
read.

The head puts the port of its inbox, the launch's key and its facts (files, options and versions)
into the launcher's store. Each stage compares the facts with its own, and connects to the head.

    stage --hello--> head --go--> stage --ready--> head

"hello" has the stage's address, and what is wrong with it. "go" has the next stage's address, to
which the stage connects, and the digest of the head's weights. A stage with the same files computes
no digest.
"""

import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ...machine import turn_off_cudnn_attention
from ..config import TargetConfig
from ..identity import WEIGHT_PATTERNS, config_digest, weights_digest
from ..pretrained import read_config
from ..streamed_loading import build_without_weights
from .exchange import Exchange
from .links import ProcessLink, StageLink, report_loss_on_sigterm
from .messages import HEAD, StageLost
from .slices import EndSlice, LayerSlice
from .stage import Stage, leave_interrupts_to_the_head, serve

logger = logging.getLogger(__name__)

MEET_SECONDS = 600.0
"""Longest wait for the other processes. Machines are seldom started at the same time."""
LOAD_SECONDS = 3600.0
"""Longest wait until all stages have read their weights."""
KEY = "head"
"""Name of the head's port, key and facts in the launch's store: the same in all versions, which the facts name."""
FILES = "files"
"""The fact that may differ: where and which the weight files are. Without a difference no digest is computed."""
LOCAL_OPTIONS = frozenset({"name_or_path", "device", "tokenizer_options", "trust_remote_code"})
"""Options of the target that may differ between processes."""


def rank() -> int:
    """Return the number of this process in the launch."""
    return int(os.environ.get("RANK", "0"))


def is_beside_head() -> bool:
    """Return whether this process is on the machine of the head, the launch's first one."""
    return os.environ.get("LOCAL_RANK") == str(rank())


def launch_store() -> Store:
    """Return the store that all processes of the launch share."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS)))
    except DistError as error:
        raise ValueError(
            f"not all processes of target.stage_layers have come within {MEET_SECONDS:.0f} s ({error}); do they run, and can "
            f"their machines reach {os.environ['MASTER_ADDR']}?"
        ) from error
    return PrefixStore("outrider/stages", store)


def head_or_stage(config: TargetConfig, device: torch.device) -> "Head":
    """Return the head in the launch's first process. Any other process is a stage, and ends here."""
    if device.type != "cpu" and device.index is None:
        # The machine may have several of this kind.
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    if rank() > 0:
        serve_stage(config, device)
    return Head(config, device)


def stage_ranges(config: TargetConfig, launched: int | None = None) -> list[range]:
    """Return the layers of each stage. `launched` is the number of processes; None counts them.

    Raises ValueError if the launch or the model has not the right number of processes or layers.
    """
    assert config.stage_layers is not None
    counts = [int(number) for number in config.stage_layers]
    needed, launched = 1 + len(counts), launched or int(os.environ.get("WORLD_SIZE", "1"))
    if launched != needed:
        raise ValueError(
            f"target.stage_layers is {counts}, which needs {needed} processes (a head, and one for each stage), and "
            f"{'one was' if launched == 1 else f'{launched} were'} launched; add --launch pipeline_cpu --num_processes "
            f"{needed} (or accelerate launch --num_processes {needed}), or change target.stage_layers"
        )
    num_layers = int(read_config(config).get_text_config().num_hidden_layers)
    if sum(counts) != num_layers:
        least, more = divmod(num_layers, len(counts))
        even = [least + (index < more) for index in range(len(counts))]
        remedy = f"for example {even}" if least else "and each stage needs one: launch fewer processes"
        raise ValueError(
            f"target.stage_layers is {counts}, which is {sum(counts)} layers, and {config.name_or_path} has {num_layers}; "
            f"their sum must be the model's number of layers, {remedy}"
        )
    return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


class Head:
    """The head's way to its part of the model, and to its stages.

    A constructed head has a place in the launch's store, so that stages notice if it ends.
    """

    def __init__(self, config: TargetConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._ranges = stage_ranges(config)
        self._store: Store = launch_store()
        self.weights_sha256 = ""
        """Digest of the weights; there after `load`."""

    def load(self) -> tuple[EndSlice, ProcessLink]:
        """Load the ends of the model, after all stages have come with the same model.

        Raises ValueError, before weights are read, for stages that are missing or different.
        """
        # 1. Build the model without weights: models and files that can't be divided are errors.
        config = self._config
        skeleton = build_without_weights(config)
        # 2. Meet the stages.
        count = len(self._ranges)
        names = {number: f"stage {number} of {count} ({_layers(part)})" for number, part in enumerate(self._ranges, start=1)}
        key = secrets.token_hex(16)
        exchange = Exchange(HEAD, os.environ["MASTER_ADDR"], key)
        try:
            self._store.set(KEY, json.dumps([exchange.port, key, facts(config)]))
            addresses = _gather(exchange, names)
            self.weights_sha256 = digest(config)
            for number in names:
                exchange.send(number, "go", following=addresses.get(number + 1), digest=self.weights_sha256)
            # 3. Load the ends, while the stages load their layers.
            ends = EndSlice.load(skeleton, self._device)
            exchange.wait_for(names, "ready", LOAD_SECONDS)
        except BaseException as error:
            exchange.close("failed", stage=HEAD, error=f"can't go on: {error}")
            raise
        link = ProcessLink(exchange, names)
        report_loss_on_sigterm(link)
        return ends, link


def _gather(exchange: Exchange, names: dict[int, str]) -> dict[int, list[Any]]:
    """Wait for all stages, connect to them, and return the name and address of each.

    Adds processes and machines to their names. Raises ValueError with the problems of all stages, or
    if one doesn't come.
    """
    problems, addresses = "", {}
    for number, hello in sorted(exchange.wait_for(names, "hello", MEET_SECONDS).items()):
        names[number] += f" of process {hello.fields['process']} on {hello.fields['machine']}"
        addresses[number] = [names[number], *hello.fields["address"]]
        exchange.connect(number, *addresses[number])
        if hello.fields["problem"]:
            problems += f"\n{names[number]} {hello.fields['problem']}"
    if problems:
        raise ValueError(
            "all processes of target.stage_layers must have the same model, options and versions; give all machines the same "
            f"command, files and packages:{problems}"
        )
    return addresses


def serve_stage(config: TargetConfig, device: torch.device) -> NoReturn:
    """Be a stage: load its layers, handle the head's messages, and end the process with the head."""
    leave_interrupts_to_the_head()
    turn_off_cudnn_attention(device)
    exchange = None
    try:
        # 1. Tell the head the address of this process, or why it can't be a stage: the head reports both.
        address = os.environ["MASTER_ADDR"]
        port, key, head_facts = json.loads(launch_store().get(KEY))
        exchange = Exchange(rank(), address, key)
        own = exchange.connect(HEAD, "the head", address, port)
        problem, own_facts = "", dict[str, str]()
        try:
            part, skeleton, own_facts = stage_ranges(config)[rank() - 1], build_without_weights(config), facts(config)
            problem = differences(own_facts, head_facts)
        except (ValueError, OSError) as error:
            problem = f"can't be one: {error}"
        at = [address if is_beside_head() else own, exchange.port]
        exchange.send(HEAD, "hello", process=os.getpid(), machine=socket.gethostname(), address=at, problem=problem)
        # 2. Connect to the process that reads the results, and load.
        sha256 = "" if problem or own_facts[FILES] == head_facts[FILES] else digest(config)
        go = exchange.wait_for({HEAD: "the head"}, "go", LOAD_SECONDS)[HEAD].fields
        if sha256 not in ("", go["digest"]):
            raise StageLost(f"it has other weights (digest {sha256[:12]}) than the head ({go['digest'][:12]})")
        following = HEAD
        if go["following"] is not None:
            following = rank() + 1
            exchange.connect(following, *go["following"])
        stage = Stage(LayerSlice.load(skeleton, part, device))
        exchange.send(HEAD, "ready")
        # 3. Serve.
        serve(stage, StageLink(exchange, following), fast_linears=config.fast_linears)
    except Exception as error:
        is_lost = isinstance(error, (StageLost, DistError))
        if exchange is not None:
            text = str(error) if is_lost else f"{type(error).__name__}: {error}"
            exchange.close("failed", stage=rank(), error=f"failed: {text}")
        if not is_lost:
            raise
        # On its own machine the head prints the error.
        logger.log(logging.INFO if is_beside_head() else logging.WARNING, "this stage of the target ends: %s", error)
        raise SystemExit(1) from None


def facts(config: TargetConfig) -> dict[str, str]:
    """Return what must be equal in all processes, without reading weights."""
    folder = Path(config.name_or_path)
    paths = sorted(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)) if folder.is_dir() else []
    stats = [(path.name, path.stat()) for path in paths]
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in LOCAL_OPTIONS}
    machine = (socket.gethostname(), Path("/").stat().st_dev)  # containers of one machine have different roots
    return {
        **{f"version of {name}": version(name) for name in ("torch", "transformers", "outrider")},
        **{f"target.{name}": str(value) for name, value in options.items()},
        "digest of config.json": config_digest(config.name_or_path)[:12],
        "weight files": ", ".join(f"{name} of {stat.st_size:,} bytes" for name, stat in stats),
        FILES: str([machine, *[(name, stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino) for name, stat in stats]]),
    }


def differences(own: Mapping[str, str], head: Mapping[str, str]) -> str:
    """Return in which facts a stage differs from the head, except the files that it reads."""
    names = [name for name, value in head.items() if own.get(name) != value and name != FILES]
    return ", and ".join(f"has {own.get(name) or 'no'} {name}, and the head has {head[name] or 'none'}" for name in names)


def digest(config: TargetConfig) -> str:
    """Return the digest of the target's weights."""
    return weights_digest(config.name_or_path, getattr(read_config(config), "_commit_hash", None))


def _layers(part: range) -> str:
    return f"layer {part.start}" if len(part) == 1 else f"layers {part.start} to {part.stop - 1}"
