"""Hidden states from a running vLLM are those of transformers, up to rounding."""

import importlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from outrider.data.chat import encode_prompt
from outrider.data.suites import load_suite
from outrider.distill.config import DistillConfig
from outrider.distill.regenerate.engines.served_states import open_states
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from .servers import VLLM_PYTHON, missing

pytestmark = pytest.mark.engines

LAYERS, NUM_LAYERS = [2, 4, 5], 8


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@missing(VLLM_PYTHON)
@torch.inference_mode()
def test_states_from_vllm_are_those_of_transformers(
    dtype: str, most: float, demo_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "bench"))
    servers = importlib.import_module("vllm_servers")
    monkeypatch.setattr(servers, "PYTHON", VLLM_PYTHON)
    target = load_target(TargetConfig(name_or_path=str(demo_target_dir), dtype=dtype, device="cpu"))
    prompts = load_suite("stdlib", limit=8).prompts
    texts = [encode_prompt(prompt.messages(prompt.turns[0]), target.tokenizer)[0] for prompt in prompts]
    folder = tmp_path / "states"
    folder.mkdir()
    with ExitStack() as stack:
        serving = {"--model": demo_target_dir, "--dtype": dtype, "--max-model-len": 1024}
        serving |= servers.states_options([*LAYERS, NUM_LAYERS], str(folder))
        (url,) = stack.enter_context(servers.running(serving, 1, 1))
        places = {"base_url": url, "states_dir": str(folder)}
        config = DistillConfig(engine="vllm", features="last_hidden", feature_layers=LAYERS, **places)
        served = open_states(config, target, stack)
        for text in texts:
            last, inputs = target.hidden_states(text[None], served.layers)
            there, layers = served.read([text])
            pairs = zip((last, *inputs.chunk(len(LAYERS), dim=-1)), (there, *layers.values()), strict=True)
            for ours, theirs in pairs:
                assert (theirs.float() - ours.float()).abs().max() < most * ours.float().abs().max()
    assert not list(folder.iterdir()), "files are deleted when they have been read"
