"""A causal LM of transformers that drafts as it is, without training: `draft_model:DIR`.

It is loaded in the target's type and device, and its code, if it comes with any, never runs. The
folder is only read: tuned settings and calibrations aren't written into it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from ....data.files import read_json
from ...bounded_build import CANT_BE_BUILT, require_possible_numbers
from ...llm.hf_target import HFTarget
from ...llm.identity import tokenizer_digest
from ...llm.pretrained import load_pretrained, loading_errors
from ..draft_model import DraftModel
from ..registry import DrafterSpec
from ..small_models import architecture_in, fit_vocabulary, require_common_vocabulary, require_same_tokenizer
from .folder import CONFIG_FILE


def model_spec(folder: Path) -> DrafterSpec:
    """Return the specification of a model as a drafter, from its configuration alone.

    Raises ValueError for a configuration that transformers can't read without the model's code.
    """
    return DrafterSpec.of("draft_model", {"architecture": architecture_in(_read_config(folder))})


def load_model(folder: Path, config: Any, target: HFTarget) -> DraftModel:
    """Load a model to draft for `target`, with the drafting options of `config`.

    Raises ValueError if it has another vocabulary or tokenizer, which is checked before its weights
    are read, or if the weights are incomplete.
    """
    # 1. Compare what ids mean. A tokenizer of the target may be unknown (see `generate`).
    require_common_vocabulary(int(_read_config(folder).get_text_config().vocab_size), target)
    if target.identity.tokenizer_sha256:
        digest = _tokenizer_digest(folder, target.tokenizer_options)
        require_same_tokenizer(folder.name, digest, target.identity)
    # 2. Load the weights, in the target's type, on its device.
    model = load_pretrained(
        str(folder),
        f"the draft model in {folder}",
        dtype=target.dtype,
        attn_implementation=target.model.config._attn_implementation,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    model.to(device=target.device)  # type: ignore[call-arg]  # transformers wraps `to` in a way that hides its signature
    fit_vocabulary(model, target.vocab_size)
    reader = HFTarget(model, target.tokenizer, target.identity, compiled=target.compiled, cuda_graphs=target.cuda_graphs)
    reader.require_plain_head("choose another draft model")
    return DraftModel(config, reader)


def _read_config(folder: Path) -> PretrainedConfig:
    require_possible_numbers(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, *CANT_BE_BUILT) as error:
        raise ValueError(
            f"the draft model in {folder} can't be read ({error!s:.500}); it must be a causal LM that transformers has itself: "
            "code that comes with a draft model isn't run"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"the draft model in {folder} is quantised, which isn't supported; give the model with plain weights")
    return config


def _tokenizer_digest(folder: Path, tokenizer_options: Mapping[str, Any]) -> str:
    options = {"trust_remote_code": False, "local_files_only": True, **tokenizer_options}
    with loading_errors(f"the tokenizer of the draft model in {folder}", str(folder)):
        return tokenizer_digest(AutoTokenizer.from_pretrained(folder, **options))
