"""vLLM's connector that writes hidden states to files, for vLLM's CPU build, whose own one needs CUDA streams.

PYTHONPATH=scripts/engines vllm serve TARGET ... --kv-transfer-config '{"kv_connector": "CpuStatesConnector",
  "kv_connector_module_path": "cpu_states_connector", "kv_role": "kv_producer",
  "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/states"}}'
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # type: ignore[import-not-found]
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes each request's states at once, on the thread of the pass."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size) + blocks[:, None] * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)
        self._written = self._finished | {pending.req_id}

    @property
    def _finished(self) -> set[str]:
        return getattr(self, "_written", set())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Write what a step has left to be written; return the requests whose blocks may be freed."""
        if self.has_connector_metadata():
            for pending in getattr(self._get_connector_metadata(), "pending_saves", ()):
                self._submit_async_write(pending)
        done, self._written = self._finished, set()
        return done or None, None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        """Any layout will do."""
