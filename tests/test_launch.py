"""Launch files of conf/launch/, parsed as by `accelerate launch`, and launch errors."""

from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from outrider.train import processes as launch
from outrider.train.processes import make_accelerator, require_supported_launch

from .conftest import REPOSITORY

FILES = sorted((REPOSITORY / "conf" / "launch").glob("*.yaml"))
NAMES = {
    *("one_gpu", "one_gpu_offload", "one_node", "one_node_zero", "one_node_fsdp2", "several_nodes", "several_nodes_zero"),
    *("cpu", "pipeline", "pipeline_cpu"),
}


def parsed(file: Path, *options: str) -> Namespace:
    """Parse the launcher's arguments, completed with the values of `file`."""
    arguments = launch_command_parser().parse_args(["--config_file", str(file), *options, "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    arguments.main_process_port = 0
    return arguments


def config_of(file: Path) -> ClusterConfig:
    config = load_config_from_file(str(file))  # refuses unknown keys
    assert isinstance(config, ClusterConfig)
    return config


def test_the_list_of_launch_files_is_complete() -> None:
    assert {file.stem for file in FILES} == NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_launch_file_has_the_processes_of_its_name_and_no_training_option(file: Path) -> None:
    config = config_of(file)
    sizes = {"one": (1, 8), "several": (2, 8), "cpu": (1, 2), "one_gpu": (1, 1), "pipeline": (4, 1), "pipeline_cpu": (1, 3)}
    machines, processes_each = next(
        sizes[name] for name in (file.stem, file.stem[:7], file.stem.split("_")[0]) if name in sizes
    )
    assert config.mixed_precision == ("no" if file.stem in ("cpu", "pipeline", "pipeline_cpu") else "bf16")
    assert (config.num_machines, config.num_processes) == (machines, machines * processes_each)
    assert not {"gradient_accumulation_steps", "gradient_clipping"} & {*config.deepspeed_config}
    parser = launch_command_parser()
    known = {action.dest for action in parser._actions}
    sections = {"": config.deepspeed_config, "fsdp_": config.fsdp_config}
    for prefix, section in sections.items():
        assert {key if key.startswith(prefix) else prefix + key for key in section} <= known, "accelerate would not read it"
    assert bool(config.deepspeed_config) == (config.distributed_type == DistributedType.DEEPSPEED)
    assert bool(config.fsdp_config) == (config.distributed_type == DistributedType.FSDP)


@pytest.mark.parametrize(
    ("name", "options", "stage", "offload"),
    [
        ("one_node_zero", [], 2, "none"),
        ("one_node_zero", ["--zero_stage", "1"], 1, "none"),
        ("one_node_zero", ["--zero_stage", "3", "--offload_optimizer_device", "cpu"], 3, "cpu"),
        ("several_nodes_zero", [], 2, "none"),
        ("one_gpu_offload", [], 2, "cpu"),
    ],
)
def test_deepspeed_gets_the_stage_of_the_file_or_of_the_command_line(name, options, stage, offload, monkeypatch):
    pytest.importorskip("deepspeed")
    arguments = parsed(REPOSITORY / f"conf/launch/{name}.yaml", *options)
    command, environment = prepare_deepspeed_cmd_env(arguments)
    assert command is None, "torchrun starts the processes, not DeepSpeed's own launcher, which wants ssh or pdsh"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage
    assert plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]["device"] == offload
    assert plugin.gradient_clipping == "auto"
    assert not plugin.zero3_init_flag


def test_fsdp_gets_version_2_and_loads_the_target_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in prepare_multi_gpu_env(parsed(REPOSITORY / "conf/launch/one_node_fsdp2.yaml")).items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.auto_wrap_policy, plugin.cpu_ram_efficient_loading) == (2, None, False)


@pytest.mark.parametrize("feature", ["DEEPSPEED", "FSDP"])
def test_sharding_that_accelerate_would_silently_skip_is_an_error(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv(f"ACCELERATE_USE_{feature}", "true")
    with pytest.raises(ValueError, match=f"sets {feature}, and accelerate runs NO instead"):
        require_supported_launch(accelerator)


def test_gradient_clipping_in_the_launch_file_is_an_error() -> None:
    accelerator = Mock(
        spec=Accelerator,
        num_processes=1,
        gradient_accumulation_steps=1,
        mixed_precision="no",
        distributed_type=DistributedType.DEEPSPEED,
        state=Mock(deepspeed_plugin=Mock(gradient_clipping=0.3)),
    )
    with pytest.raises(ValueError, match=r"gradient_clipping to 0\.3.*train\.max_grad_norm"):
        require_supported_launch(accelerator)


def test_missing_deepspeed_is_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'outrider\[deepspeed\]'"):
        make_accelerator()
