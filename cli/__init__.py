"""The command `outrider`, and the pipeline behind `train.py`."""

from ..data.entry import require_entry

require_entry()
