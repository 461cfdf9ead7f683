"""Counters of operations that make the host wait for an accelerator, also on a CPU."""

import runpy

from .conftest import REPOSITORY

_COUNTERS = runpy.run_path(str(REPOSITORY / "scripts" / "gpu" / "host_reads.py"))
HostReads, ScalarReads = _COUNTERS["HostReads"], _COUNTERS["ScalarReads"]
