"""Trains as a launched process; run by test_resume.py under torchrun.

python launched_train.py TARGET SHARDS OUTPUT 'JSON of TrainConfig' 'JSON of the drafter'
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from outrider.models.config import TargetConfig
from outrider.models.target import load_target
from outrider.train.config import TrainConfig
from outrider.train.run import train

target_dir, shards_dir, output_dir = map(Path, sys.argv[1:4])
train(
    TrainConfig(**json.loads(sys.argv[4])),
    json.loads(sys.argv[5]),
    load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32"), torch.device("cpu")),
    shards_dir,
    output_dir / "train",
    output_dir / "drafter",
    Accelerator(),
)
torch.distributed.destroy_process_group()
