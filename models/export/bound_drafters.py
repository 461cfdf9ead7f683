"""Drafters that a model of transformers keeps between calls of `generate`."""

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
from ..drafters.saved.folder import CONFIG_FILE, WEIGHTS_FILE, read_drafter_config
from ..drafters.saved.loading import load_drafter, require_fitting_target
from ..target.hf_target import HFTarget
from ..target.identity import config_digest, tokenizer_digest, weights_digest

logger = logging.getLogger(__name__)

PLAIN = "or call generate without custom_generate"
MAX_KEPT = 2
"""Drafters with their weights: one more would seldom be used again, and costs its memory."""
ATTRIBUTE = "_outrider_drafters"
"""Of the model, whose memory and drafters' are so given back together."""


@dataclass(slots=True)
class Bound:
    """A drafter, and the model as its target."""

    target: HFTarget
    drafter: Any
    trained_for: TargetIdentity
    state: tuple[Any, ...]
    """Of files and model, when they were bound: whatever changes it makes them strangers."""
    tokenizer: Any = None
    """The one that was last seen to be the drafter's."""

    def release(self) -> None:
        """Keep nothing of the texts that were decoded, and nothing on the model."""
        self.target.release_cache()
        self.target.release_hooks()
        if isinstance(self.drafter, DraftModel):
            self.drafter.reader.release_cache()


class BoundDrafters:
    """Those of one model, the last used at the end, and whether one of them is drafting.

    A copy of the model has none of them: neither copying nor pickling goes beyond this object,
    which is None in the copy.
    """

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, ...], Bound] = {}
        self.in_use = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def drafters_of(model: PreTrainedModel) -> Iterator[BoundDrafters]:
    """The model's drafters, for one caller at a time.

    Raises RuntimeError while there is another.
    """
    if vars(model).get(ATTRIBUTE) is None:
        vars(model).pop(ATTRIBUTE, None)
    # Also those of another copy of this code, since transformers makes one for every folder.
    drafters = vars(model).setdefault(ATTRIBUTE, BoundDrafters())
    if not drafters.in_use.acquire(blocking=False):
        raise RuntimeError(
            "the model is decoding with a drafter already, in another thread or in the call around this one, and it has one KV "
            "cache: let that end first, put the prompts into one batch, or load the model once more"
        )
    try:
        yield drafters
    finally:
        drafters.in_use.release()


def bind(
    model: PreTrainedModel, drafters: BoundDrafters, folder: Path, options: dict[str, Any], tokenizer: Any = None
) -> Bound:
    """Return the folder's drafter for the model.

    One that was kept, as long as neither has changed, else loaded. Raises ValueError where the
    drafter was made for another width, vocabulary or (where it is given) tokenizer. What would only
    make it a worse drafter, such as other weights of the same shape, is a warning.
    """
    name = (__name__, str(folder), repr(sorted(options.items())))
    bound = drafters.by_name.pop(name, None)
    state = _state(model, folder)
    if bound is None or bound.state != state:
        bound = None  # before the next takes its memory
        while len(drafters.by_name) >= MAX_KEPT:
            del drafters.by_name[next(iter(drafters.by_name))]
        bound = _load(model, folder, options, state)
    drafters.by_name[name] = bound
    if tokenizer is not None and tokenizer is not bound.tokenizer:
        identity = replace(bound.target.identity, tokenizer_sha256=tokenizer_digest(tokenizer))
        require_fitting_target(folder, bound.trained_for, identity)
        bound.tokenizer = tokenizer
    return bound


def _state(model: PreTrainedModel, folder: Path) -> tuple[Any, ...]:
    files = tuple(
        (path := folder / name).is_file() and (path.stat().st_mtime_ns, path.stat().st_size)
        for name in (CONFIG_FILE, WEIGHTS_FILE)
    )
    # Drafters hold the model's embeddings and head themselves, whose size may change, too
    # (resize_token_embeddings).
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = [tuple(end.weight.shape) for end in ends]
    return (files, *map(id, ends), *sizes, model.device, model.dtype, model.config.get_text_config()._attn_implementation)


def _load(model: PreTrainedModel, folder: Path, options: dict[str, Any], state: tuple[Any, ...]) -> Bound:
    saved = read_drafter_config(folder)
    config = model.config.get_text_config()
    identity = replace(saved.target, name=type(model).__name__, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    target = HFTarget(model, None, identity)
    with torch.random.fork_rng():  # weights are drawn before they are read, which must not change what is sampled
        drafter = load_drafter(folder, target, **options)
    _warn_of_other_weights(model, saved.target)
    return Bound(target=target, drafter=drafter, trained_for=saved.target, state=state)


def _warn_of_other_weights(model: PreTrainedModel, trained_for: TargetIdentity) -> None:
    """Both digests can be told in no time only where the drafter's target was of the same sort.

    A directory, or the Hub's.
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
            "the drafter was trained for %s, and the model is %s of another revision or configuration: its answers stay its "
            "own, but fewer drafts may be accepted",
            trained_for.name,
            source,
        )


def require_usable(model: PreTrainedModel) -> None:
    """Raise ValueError for a model in a state in which drafting would change its answers.

    The same holds for a form that drafting can't follow.
    """
    # Linear layers and embeddings are the same in both modes, and new ones (of
    # resize_token_embeddings) are in training mode.
    if any(module.training for module in model.modules() if not isinstance(module, nn.Linear | nn.Embedding)):
        raise ValueError(
            "the model, or a part of it, is in training mode, where dropout makes every pass another; call model.eval() first"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        names = ", ".join(sorted("elsewhere (offloaded)" if each.type == "meta" else str(each) for each in devices))
        raise ValueError(f"the model's weights lie on {names}, and drafting needs them on one device; load it so, {PLAIN}")
    device_type = next(iter(devices)).type
    if torch.is_autocast_enabled(device_type):
        raise ValueError(
            f"generate was called under torch.autocast({device_type!r}), in which a draft tree's passes are rounded in another "
            "way than plain ones; leave autocast, and load the model in the type that you want (dtype=torch.bfloat16)"
        )
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"the model's attention is {implementation}, which takes no mask of a draft tree; load it with "
            f"attn_implementation='sdpa', {PLAIN}"
        )
    _require_plain_ends(model)


def _require_plain_ends(model: Any) -> None:
    """Raise ValueError where the model reads more than tokens, or wraps embeddings or head."""
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "something changes what the model reads, as PEFT's prompt and prefix tuning do, and drafting reads tokens alone; "
            f"generate with the model itself, {PLAIN}"
        )
    for module, kind in ((model.get_input_embeddings(), nn.Embedding), (model.get_output_embeddings(), nn.Linear)):
        if not isinstance(module, kind):
            raise ValueError(
                f"the model has a {type(module).__module__}.{type(module).__name__} in place of an nn.{kind.__name__}, and "
                f"drafters read embeddings and head directly; merge adapters into it (PEFT's merge_and_unload), {PLAIN}"
            )
