"""Drafters that are attached to a model of transformers between calls of `generate`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...data.manifest import TargetIdentity
from ..drafters.draft_model import DraftModel
from ..drafters.saved.folder import CONFIG_FILE, WEIGHTS_FILE, read_drafter_config, require_fitting_target
from ..drafters.saved.loading import load_drafter, trained_parts
from ..drafters.saved.parts import DrafterParts, parse_drafter_name
from ..llm.hf_target import HFTarget
from ..llm.identity import config_digest, tokenizer_digest, weights_digest

logger = logging.getLogger(__name__)

UNKNOWN_TARGET = TargetIdentity(
    name="",
    revision=None,
    weights_sha256="",
    config_sha256="",
    quantization="",
    tokenizer_sha256="",
    hidden_size=0,
    vocab_size=0,
)
"""Identity of a model that no trained drafter names as its target."""
PLAIN = "or call generate without custom_generate"
MAX_KEPT = 2
"""Number of drafters that stay loaded. More would seldom be reused, and would need memory."""
ATTRIBUTE = "_outrider_drafters"
"""Attribute of the model that holds its drafters, so that both are freed together."""


@dataclass(slots=True)
class Bound:
    """A drafter, with the model as its target."""

    target: HFTarget
    drafter: Any
    trained_for: dict[Path, TargetIdentity]
    """The target of each trained part, by the part's folder."""
    state: tuple[Any, ...]
    """State of files and model at load time. If it changes, the drafter is loaded again."""
    tokenizer: Any = None
    """Last tokenizer that was checked against the drafter's."""

    def release(self) -> None:
        """Release the KV caches of decoded texts, and the hooks on the model."""
        self.target.release_cache()
        self.target.release_hooks()
        for part in trained_parts(self.drafter):
            if isinstance(part, DraftModel):
                part.reader.release_cache()


class BoundDrafters:
    """Drafters of one model, the last used at the end, and a lock for the one in use.

    A copy of the model has no drafters: copying or pickling replaces this object by None.
    """

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, ...], Bound] = {}
        self.in_use = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def drafters_of(model: PreTrainedModel) -> Iterator[BoundDrafters]:
    """Yield the model's drafters to one caller at a time.

    Raises RuntimeError while another caller uses them.
    """
    if vars(model).get(ATTRIBUTE) is None:
        vars(model).pop(ATTRIBUTE, None)
    # Shared with other copies of this code, since transformers makes one for every folder.
    drafters = vars(model).setdefault(ATTRIBUTE, BoundDrafters())
    if not drafters.in_use.acquire(blocking=False):
        raise RuntimeError(
            "the model is decoding with a drafter already, in another thread or in the call around this one, and it has only "
            "one KV cache: wait for that call to end, put the prompts into one batch, or load the model a second time"
        )
    try:
        yield drafters
    finally:
        drafters.in_use.release()


def bind(
    model: PreTrainedModel,
    drafters: BoundDrafters,
    name: str | Path | DrafterParts,
    options: dict[str, Any],
    tokenizer: Any = None,
) -> Bound:
    """Load a drafter for the model, or reuse a loaded one if nothing has changed.

    Raises ValueError if the drafter was trained for another width, vocabulary or (if given)
    tokenizer. Differences that only make the drafter worse, such as other weights of the same
    shape, are warnings.
    """
    parts = parse_drafter_name(name)
    key = (__name__, *(str(part.folder or part.name) for part in parts.parts), repr(sorted(options.items())))
    bound = drafters.by_name.pop(key, None)
    state = _state(model, parts)
    if bound is None or bound.state != state:
        bound = None  # frees its memory before the next load
        while len(drafters.by_name) >= MAX_KEPT:
            del drafters.by_name[next(iter(drafters.by_name))]
        bound = _load(model, parts, options, state, tokenizer)
    drafters.by_name[key] = bound
    if tokenizer is not None and tokenizer is not bound.tokenizer:
        identity = replace(bound.target.identity, tokenizer_sha256=tokenizer_digest(tokenizer))
        for folder, trained_for in bound.trained_for.items():
            require_fitting_target(folder, trained_for, identity)
        bound.tokenizer = tokenizer
    return bound


def _state(model: PreTrainedModel, parts: DrafterParts) -> tuple[Any, ...]:
    paths = [folder / name for folder in parts.folders for name in (CONFIG_FILE, WEIGHTS_FILE)]
    paths += [path for part in parts.with_weights if part.is_model and part.folder for path in sorted(part.folder.glob("*.*"))]
    files = tuple(path.is_file() and (path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    # Drafters refer to the model's embeddings and head, whose size may change
    # (resize_token_embeddings).
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = [tuple(end.weight.shape) for end in ends]
    return (files, *map(id, ends), *sizes, model.device, model.dtype, model.config.get_text_config()._attn_implementation)


def _load(
    model: PreTrainedModel, parts: DrafterParts, options: dict[str, Any], state: tuple[Any, ...], tokenizer: Any
) -> Bound:
    config = model.config.get_text_config()
    trained_for = {folder: read_drafter_config(folder).target for folder in parts.folders}
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    identity = replace(next(iter(trained_for.values()), UNKNOWN_TARGET), name=type(model).__name__, **sizes)
    target = HFTarget(model, tokenizer, identity)
    with torch.random.fork_rng():  # the initialization of weights must not change sampled texts
        drafter = load_drafter(parts, target, **options)
    for identity in trained_for.values():
        _warn_of_other_weights(model, identity)
    return Bound(target=target, drafter=drafter, trained_for=trained_for, state=state)


def _warn_of_other_weights(model: PreTrainedModel, trained_for: TargetIdentity) -> None:
    """Warn if the drafter was trained for other weights than the model's.

    The digests can be compared quickly only if the drafter's target came from the same kind of
    source: a directory, or the Hub.
    """
    source = str(getattr(model, "name_or_path", ""))
    if Path(source).is_dir():
        other = trained_for.config_sha256 not in ("", config_digest(source))
    else:
        commit = getattr(model.config, "_commit_hash", None)
        other = trained_for.config_sha256 == "" and commit is not None
        other = other and weights_digest(source, commit) != trained_for.weights_sha256
    if other:
        logger.warning(
            "the drafter was trained for %s, but the model is %s of another revision or configuration: the model's answers "
            "don't change, but fewer drafts may be accepted",
            trained_for.name,
            source,
        )


def require_usable(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose answers drafting would change, or can't reproduce."""
    # Linear layers and embeddings compute the same in both modes. resize_token_embeddings leaves
    # new ones in training mode.
    if any(module.training for module in model.modules() if not isinstance(module, nn.Linear | nn.Embedding)):
        raise ValueError(
            "the model, or a part of it, is in training mode, where dropout makes each pass different; call model.eval() first"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        names = ", ".join(sorted("elsewhere (offloaded)" if device.type == "meta" else str(device) for device in devices))
        raise ValueError(f"the model's weights lie on {names}, but drafting needs one device; load it on one, {PLAIN}")
    device_type = next(iter(devices)).type
    if torch.is_autocast_enabled(device_type):
        raise ValueError(
            f"generate was called under torch.autocast({device_type!r}), which rounds a draft tree's passes differently than "
            "plain ones; leave autocast, and load the model in the type that you want (dtype=torch.bfloat16)"
        )
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"the model's attention is {implementation}, which doesn't support the mask of a draft tree; load it with "
            f"attn_implementation='sdpa', {PLAIN}"
        )
    _require_plain_ends(model)


def _require_plain_ends(model: Any) -> None:
    """Raise ValueError if the model reads more than tokens, or if embeddings or head are
    wrapped."""
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "something changes the model's inputs, as PEFT's prompt and prefix tuning do, but drafting supports tokens only; "
            f"generate with the model itself, {PLAIN}"
        )
    for module, kind in ((model.get_input_embeddings(), nn.Embedding), (model.get_output_embeddings(), nn.Linear)):
        if not isinstance(module, kind):
            raise ValueError(
                f"the model has a {type(module).__module__}.{type(module).__name__} in place of an nn.{kind.__name__}, but "
                f"drafters read embeddings and head directly; merge adapters into it (PEFT's merge_and_unload), {PLAIN}"
            )
