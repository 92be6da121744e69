"""The log of one child process: a file that cannot grow without bound, and its last lines for messages.

Must never interpret what is written.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import BinaryIO

from gateway import private_file

MAX_FILE_BYTES = 8 << 20
TAIL_LINES = 20
MAX_LINE_CHARS = 500

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LogFile:
    """Appends to `path`; a full one, or that of an earlier run, becomes `path.1` in place of the last one."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_FILE_BYTES, told_elsewhere: str | None = None
    ) -> None:
        """Open a new, empty log.

        Args:
            path: the file.
            max_bytes: size at which it is replaced.
            told_elsewhere: lines that begin so are written, but are never among the last lines.

        Raises:
            OSError: the file cannot be opened.
        """
        self.path = path
        self._max_bytes = max_bytes
        self._told_elsewhere = told_elsewhere
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = ""
        self._lost_bytes = 0
        self._file = self._open()

    def _open(self) -> BinaryIO:
        if self.path.is_file():  # never rename what is no ordinary file, such as a device
            self.path.chmod(private_file.FILE_MODE)
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._written_bytes = 0
        return private_file.open_new(self.path)

    def write(self, data: bytes) -> None:
        """Append output as it comes; lines may be cut anywhere.

        What a full disk does not take is lost, and its amount noted once there is room again: a process must
        not be stopped by its log.
        """
        try:
            if self._written_bytes + len(data) > self._max_bytes and self._written_bytes > 0:
                self._file.close()
                self._file = self._open()
            if self._lost_bytes:
                self._file.write(f"[{self._lost_bytes} bytes of log were lost]\n".encode())
                self._lost_bytes = 0
            self._file.write(data)
            self._written_bytes += len(data)
        except OSError:
            self._lost_bytes += len(data)
        *lines, rest = (self._rest + data.decode(errors="replace")).split("\n")
        if self._told_elsewhere is not None:
            lines = [line for line in lines if not line.startswith(self._told_elsewhere)]
        self._tail.extend(line[:MAX_LINE_CHARS] for line in lines[-TAIL_LINES:])
        self._rest = rest[:MAX_LINE_CHARS]

    def last_lines(self, count: int) -> list[str]:
        """The last non-empty lines, without terminal codes."""
        lines = [_TERMINAL_CODES.sub("", line).rstrip() for line in (*self._tail, self._rest)]
        return [line for line in lines if line][-count:]

    def close(self) -> None:
        """Close the file; the last lines stay readable."""
        self._file.close()
