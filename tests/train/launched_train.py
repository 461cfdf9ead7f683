"""Trains as one of the processes that were launched together; run by test_processes.py and
test_deepspeed.py.

python launched_train.py TARGET SHARDS OUTPUT 'JSON of the trainings, by name: {"config":
TrainConfig, "drafter": {...}}'

A training with a "from" goes on where that other one's checkpoint of the step "at" was written, as
after a kill. "zero_stage" and "mixed_precision" take the place of the launcher's, "shards" that of
SHARDS. "tensor_parallel" holds the target in slices. With "fsdp" it is FSDP2 that shares all
trainings from there on.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from outrider.models.drafters import parse_drafter
from outrider.models.target.config import TargetConfig
from outrider.models.target.loading import load_target
from outrider.train.config import TrainConfig
from outrider.train.launch import make_accelerator
from outrider.train.run import train

target_dir, shards_dir, output_dir = map(Path, sys.argv[1:4])


def relaunched(training: dict[str, Any]) -> Accelerator:
    """The same processes as if launched otherwise, which spares importing everything anew."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(training.get("zero_stage", 2))
    return make_accelerator(training.get("mixed_precision"))


def with_fsdp2(accelerator: Accelerator) -> Accelerator:
    """accelerate knows FSDP on accelerators only, though all that it does with it runs on a CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
    )
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


accelerator, way = make_accelerator(), None
targets = {False: load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32"), torch.device("cpu"))}
for name, training in json.loads(sys.argv[4]).items():
    folder = output_dir / name
    before, way = way, (training.get("zero_stage"), training.get("mixed_precision"))
    if "zero_stage" in training and way != before:
        accelerator = relaunched(training)
    if training.get("fsdp"):
        accelerator = with_fsdp2(accelerator)
    if "from" in training and accelerator.is_main_process:
        step = f"step-{training['at']:08d}"
        shutil.copytree(output_dir / training["from"] / "train/checkpoints" / step, folder / "train/checkpoints" / step)
    accelerator.wait_for_everyone()
    config = TrainConfig(**training["config"])
    shards = Path(training.get("shards", shards_dir))
    in_slices = training.get("tensor_parallel", False)
    if in_slices not in targets:
        targets[in_slices] = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32", tensor_parallel=True))
    train(
        config,
        parse_drafter(training["drafter"]),
        targets[in_slices],
        shards,
        folder / "train",
        folder / "drafter",
        accelerator,
    )
torch.distributed.destroy_process_group()
