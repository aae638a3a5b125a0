"""Runs inside vLLM: its connector that writes hidden states, made to work on a CPU.

vLLM's own copies through a CUDA stream into pinned memory. This one copies the rows by itself; the
rest (paths, locks, the writing threads) is vLLM's. Named on the command line as
`kv_connector_module_path`; imports vllm alone, so only vLLM may import it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Copied:
    """Stands for a CUDA event: a copy on the CPU is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CPUHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes `hidden_states` [tokens, layers, H] and `token_ids` [tokens] of each request."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + offsets).flatten()
        # indexing copies: the blocks may be given to another request from now on
        rows = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}
        done = _Copied()
        lock = self._lock_fds.pop(pending.req_id, None)
        written = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))
