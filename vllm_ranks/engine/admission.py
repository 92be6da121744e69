"""Requests under way across the API servers of one launch, for `max_num_queued_reqs`.

Each server writes its own slot of a small shared file and adds up all slots, without locks, as vLLM's
SharedAdmissionStats does (vllm/v1/engine/admission_control.py).
"""

from __future__ import annotations

import mmap
from pathlib import Path

_SLOT_BYTES = 64
"""A cache line per server, so that their writes do not disturb each other."""


class AdmissionCounters:
    """One server's view of the shared counters."""

    def __init__(self, path: Path, client_index: int, client_count: int) -> None:
        """Open the file, creating it if this is the first server."""
        with path.open("a+b") as file:
            file.truncate(client_count * _SLOT_BYTES)
            self._map = mmap.mmap(file.fileno(), client_count * _SLOT_BYTES)
        self._counters = memoryview(self._map).cast("Q")
        self._own = client_index * _SLOT_BYTES // 8
        self._slots = range(0, client_count * _SLOT_BYTES // 8, _SLOT_BYTES // 8)

    def set_own(self, requests: int) -> None:
        """Requests under way at this server."""
        self._counters[self._own] = requests

    def total(self) -> int:
        """Requests under way at all servers."""
        return sum(self._counters[slot] for slot in self._slots)
