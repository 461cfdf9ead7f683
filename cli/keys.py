"""Unknown keys of a configuration, each with a suggested option. Doesn't import torch."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from .describe import Option, drafter_sections, sections

EPOCHS = (
    "the length of the training is train.steps, in optimizer steps; an epoch takes "
    "examples / (train.batch_size x train.gradient_accumulation x processes) of them"
)
ALIASES = {
    "lr": "train.learning_rate",
    "peak_lr": "train.learning_rate",
    "max_lr": "train.learning_rate",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "total_steps": "train.steps",
    "bs": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "eval.batch_sizes",
    "eval_batch_size": "eval.batch_sizes",
    "gradient_accumulation_steps": "train.gradient_accumulation",
    "accumulate_grad_batches": "train.gradient_accumulation",
    "gradient_checkpointing": "train.activation_checkpointing",
    "warmup": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps",
    "num_warmup_steps": "train.warmup_steps",
    "wd": "train.weight_decay",
    "grad_clip": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "logging_steps": "train.log_every",
    "save_steps": "train.checkpoint_every",
    "save_every": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "train.validate_every",
    "early_stopping_patience": "train.patience",
    "report_to": "train.tracker",
    "wandb": "train.tracker",
    "wandb_project": "train.project",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_len": "data.max_length",
    "seq_length": "data.max_length",
    "seq_len": "data.max_length",
    "model_max_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "block_size": "data.max_length",
    "context_length": "data.max_length",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "data_path": "data.path",
    "train_file": "data.path",
    "max_samples": "data.limit",
    "max_train_samples": "data.limit",
    "num_samples": "data.limit",
    "template": "data.chat_template",
    "model": "target.name_or_path",
    "model_name": "target.name_or_path",
    "model_name_or_path": "target.name_or_path",
    "base_model": "target.name_or_path",
    "torch_dtype": "target.dtype",
    "load_in_4bit": "target.quantization",
    "load_in_8bit": "target.quantization",
    "output": "output_dir",
    "out": "output_dir",
    "out_dir": "output_dir",
    "save_dir": "output_dir",
    "output_path": "output_dir",
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "precision": "mixed_precision",
    "pack_weights": "target.fast_linears",
    "threads": "num_threads",
    "recipe": "conf",
    "config": "conf",
    "method": "drafter.kind",
}
"""Names in other training programs, and our options for them."""
SENTENCES = dict.fromkeys(("epochs", "epoch", "num_epochs", "num_train_epochs", "max_epochs"), EPOCHS)
"""Names in other programs for which there is no option here, and the message for each."""


def unknown_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a message for each unknown key of a configuration, by the key's full name.

    `values` has plain mappings and lists: a whole configuration, or a part of one (a file). Skips a
    section that isn't a mapping: the schema reports it.
    """
    options = {option.name: option for section in sections().values() for option in section.options}
    problems = {}
    for name in _unknown(values, "", "", options):
        problems[name] = f"{name}: there is no such option; {_help_for(name, [*options, *_drafter_names()])}"
    for prefix, drafter, settings in _drafters(values):
        problems |= _drafter_problems(prefix, drafter, settings)
    for variant, changes in _mapping(values.get("variants")).items():
        train = {"train": _mapping(changes).get("train")}
        for name in _unknown(train, "", "", options):
            problems[f"variants.{variant}.{name}"] = f"variants.{variant}.{name}: there is no such option; " + _help_for(
                name, list(options)
            )
    return problems


def _unknown(values: Mapping[str, Any], path: str, shown: str, options: Mapping[str, Option]) -> Iterator[str]:
    """Yield the full names of unknown keys.

    `path` is the prefix in the schema (eval.suites[].), `shown` the one in the values
    (eval.suites[0].).
    """
    for key, value in values.items():
        name, full = f"{path}{key}", f"{shown}{key}"
        if name in options:
            if f"{name}[].name" in options and isinstance(value, list):
                for index, part in enumerate(value):
                    yield from _unknown(_mapping(part), f"{name}[].", f"{full}[{index}].", options)
        elif not path and key in sections():
            yield from _unknown(_mapping(value), f"{name}.", f"{full}.", options)
        elif isinstance(value, Mapping) and value:
            yield from _unknown(value, f"{name}.", f"{full}.", options)
        else:
            yield full


def _drafters(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], tuple[str, Any]]]:
    """Yield each drafter's prefix of options, its options, and its settings for the evaluation."""
    shared = _mapping(values.get("drafter"))
    variants = _mapping(values.get("variants"))
    yield "drafter", shared, ("eval.settings", None if variants else _mapping(values.get("eval")).get("settings"))
    for variant, changes in variants.items():
        drafter = _mapping(_mapping(changes).get("drafter"))
        is_other = drafter.get("kind", shared.get("kind")) != shared.get("kind")
        name, settings = f"variants.{variant}", _mapping(changes).get("settings")
        yield f"{name}.drafter", drafter if is_other else {**shared, **drafter}, (f"{name}.settings", settings)


def _drafter_problems(prefix: str, drafter: Mapping[str, Any], settings: tuple[str, Any]) -> dict[str, str]:
    """Return messages for an unknown kind, unknown options, and unknown settings."""
    # 1. The kind.
    kinds, kind = drafter_sections(), drafter.get("kind")
    if kind is None:  # the kind of the drafter to start from, which is read later
        return {}
    if not isinstance(kind, str) or kind not in kinds:
        close = _closest(str(kind), list(kinds))
        meant = f"did you mean {close}? There" if close else "there"
        return {f"{prefix}.kind": f"{prefix}.kind is {kind!r}; {meant} are: {', '.join(kinds)}"}

    # 2. Options. Several options of one other kind mean that the wrong kind is chosen.
    known = [option.name.removeprefix("drafter.") for option in kinds[kind].options]
    unknown = [name for name in drafter if name not in known]
    owner = _owner(unknown)
    if owner is not None and len(unknown) > 1:
        lacks = f"{prefix}.kind is {kind}, which has no {', '.join(unknown)}: these are options of {owner}"
        return {f"{prefix}.kind": f"{lacks}. To replace the whole section, choose drafter={kind}"}
    problems = {
        f"{prefix}.{name}": f"{prefix}.{name}: the drafter {kind} has no option {name}; "
        + _help_for(name, known, f"{prefix}.", kind)
        for name in unknown
    }

    # 3. Settings of the evaluation.
    name, values = settings
    for index, setting in enumerate(values if isinstance(values, list) else []):
        for key in _mapping(setting):
            full, owner = f"{name}[{index}].{key}", _owner([key])
            if key not in known and owner:
                message = f"{name} has {key}, an option of {owner}, and the drafter is {kind}; give {kind}'s: {name}=[{{}}]"
                problems.setdefault(name, message)
            elif key not in known:
                problems[full] = f"{full}: the drafter {kind} has no option {key}; {_help_for(key, known, '', kind)}"
    return problems


def _owner(names: list[str]) -> str | None:
    """Return the first kind of drafter that has all these options."""
    wanted = {f"drafter.{name}" for name in names}
    return next((kind for kind, section in drafter_sections().items() if wanted <= {o.name for o in section.options}), None)


def _drafter_names() -> list[str]:
    return list(dict.fromkeys(option.name for section in drafter_sections().values() for option in section.options))


def _help_for(name: str, known: list[str], prefix: str = "", section: str | None = None) -> str:
    """Suggest an option for an unknown name, and the command that lists the options."""
    last = name.rpartition(".")[2]
    if last in SENTENCES:
        return SENTENCES[last]
    meant = closest(name, known)
    section = section or (meant or name).partition(".")[0]
    listing = f"outrider options {section}" if section in {*sections(), "drafter", *drafter_sections()} else "outrider options"
    return f"did you mean {prefix}{meant}? ({listing})" if meant else f"`{listing}` lists the options"


def closest(name: str, known: list[str]) -> str | None:
    """Return the known option that `name` probably means.

    Tries an alias, the same name in another section, and a similar name, in this order.
    """
    last = name.rpartition(".")[2]
    if last in ALIASES and (ALIASES[last] in known or ALIASES[last] == "conf"):
        return ALIASES[last]
    same = [option for option in known if option.rpartition(".")[2] == last]
    near = _closest(name, same) or (same[0] if same else None)
    if near is not None:
        return near
    if close := _closest(name, known):
        return close
    words = {option.rpartition(".")[2]: option for option in reversed(known)}
    close = _closest(last, list(words))
    return words[close] if close else None


def _closest(name: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
