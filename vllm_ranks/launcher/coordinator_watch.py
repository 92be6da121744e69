"""Whether the coordinator of a data-parallel group still runs. Linux.

vLLM 0.32 does not watch it in external load-balancer mode: without it no wave starts any more, so the first
request to an idle group may hang, with `/health` 200 (vllm-project/vllm#32136).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TITLE = "VLLM::DPCoord"
"""Begins the name that the process gives itself; the kernel keeps 15 characters of it."""


class CoordinatorWatch:
    """Looks for the coordinator in the session of rank 0's processes, and remembers it."""

    def __init__(self, session: int) -> None:
        """`session`: the id of the session, which is that of the process that was started for rank 0."""
        self._session = session
        self._coordinator: int | None = None

    def has_ended(self) -> bool:
        """Whether there was a coordinator and it is gone."""
        if self._coordinator is None:
            self._coordinator = _find(self._session)
            return False
        process = _process(self._coordinator)
        # Its parent may not have noticed its end yet; and its id may have gone to another process.
        return process is None or process.state == "Z" or process.session != self._session


def _find(session: int) -> int | None:
    for folder in Path("/proc").glob("[0-9]*"):
        process = _process(int(folder.name))
        if process is not None and process.session == session and process.name.startswith(TITLE):
            return int(folder.name)
    return None


class _Process(NamedTuple):
    state: str
    session: int
    name: str


def _process(pid: int) -> _Process | None:
    """What the kernel says of a process; `None` if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return _Process(fields[0], int(fields[3]), head.partition("(")[2])
