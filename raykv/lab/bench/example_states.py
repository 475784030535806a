"""vLLM's example connector for hidden states, made to run on CPUs, for comparison.

What it does there needs CUDA in two places only: pinned memory for the copy, and an event that says
when that is done. Here the copy is done when it has been made; all else is vLLM's.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


def connector(folder: str) -> dict[str, Any]:
    """What an engine's configuration says to use it."""
    return {
        "kv_connector": "ExampleStatesOnCPU",
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }


class _Done:
    """In place of a CUDA event, of something that has happened already."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True


class ExampleStatesOnCPU(ExampleHiddenStatesConnector):
    """See the module's docstring."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        places = torch.arange(self._block_size) + blocks[:, None] * self._block_size
        states = extract_from_kv_cache(
            self._kv_cache, places.flatten(), pending.token_ids.shape[0]
        ).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        if lock_fd is None and self.use_lock:
            path = Path(pending.filename + ".lock")
            lock_fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done: Any = _Done()
        future = self._executor.submit(
            self._write_tensors, tensors, done, pending.filename, lock_fd
        )
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
