"""Silence other libraries' bars, banners and warnings that a user can't act on."""

import logging
import os
import warnings

NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "huggingface_hub.utils._http", "DeepSpeed", "torch.distributed.run")
"""Loggers with warnings on the libraries' internals. Their errors are still printed."""


def silence_libraries() -> None:
    """Silence the messages of torchao, pytree, DeepSpeed, transformers and datasets at import.

    Call it before they are imported. Does nothing with OUTRIDER_DEBUG=1. Keeps the user's own
    settings.
    """
    if os.environ.get("OUTRIDER_DEBUG") == "1":
        return
    for variable, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "DS_LOG_LEVEL": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(variable, value)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torchao|deepspeed)\b")


def silence_bars() -> None:
    """Turn off transformers' bar for loading weights. Other bars stay."""
    if os.environ.get("OUTRIDER_DEBUG") == "1":
        return
    from transformers.utils import logging as transformers_logging  # slow, and imported by now

    transformers_logging._tqdm_active = False  # disable_progress_bar() also turns off the Hub's bars
