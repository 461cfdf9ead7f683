"""What makes the host wait for an accelerator, counted on a CPU: the scripts' own counters."""

import runpy

from .conftest import REPOSITORY

_COUNTERS = runpy.run_path(str(REPOSITORY / "scripts" / "gpu" / "host_reads.py"))
HostReads, ScalarReads = _COUNTERS["HostReads"], _COUNTERS["ScalarReads"]
