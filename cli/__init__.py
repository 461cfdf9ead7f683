"""The command `outrider`, and the pipeline behind `train.py`."""

from ..data import require_entry

require_entry()
