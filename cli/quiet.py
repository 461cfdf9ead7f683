"""Other libraries' noise at the start of a run: bars, banners and warnings that no user can act on."""

import logging
import os
import warnings

NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "huggingface_hub.utils._http", "DeepSpeed", "torch.distributed.run")
"""Loggers whose warnings are about the libraries' own parts. Errors still show."""


def silence_libraries() -> None:
    """Silence what torchao, pytree, DeepSpeed, transformers and datasets print while they are loaded.

    Call it before they are imported. Does nothing with OUTRIDER_DEBUG=1. Settings that the user has made stay.
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
    """Turn off transformers' bar for loading weights. Bars of downloads, and ours, stay."""
    if os.environ.get("OUTRIDER_DEBUG") == "1":
        return
    from transformers.utils import logging as transformers_logging  # slow, and imported by now

    transformers_logging._tqdm_active = False  # its function would turn off the Hub's bars too
