"""What the log of a vLLM rank tells while it loads, runs and fails: its phase, its first words of trouble.

Messages of vLLM 0.32. What is not understood changes nothing. Pure: is handed the output and the time, keeps
a bounded part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_LINE_CHARS = 2_000
MAX_ERROR_LINES = 6
ERRORS_BELONG_TOGETHER_S = 30.0
"""A failure's error lines follow each other at most this slowly; older ones were survived."""


class Phase(StrEnum):
    """What a rank is doing, in words for people."""

    STARTING = "starting"
    DOWNLOADING = "downloading"
    LOADING = "loading weights"
    COMPILING = "compiling"
    CAPTURING = "capturing graphs"
    JOINING = "waiting for its group"
    READY = "ready"
    STOPPING = "stopping"


_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.STOPPING, re.compile(r"\[shutdown\] API server: shutdown triggered")),
    (Phase.READY, re.compile(r"Application startup complete")),
    (
        Phase.JOINING,
        re.compile(
            r"init engine \(profile, create kv cache, warmup model\)|Waiting for READY message from DP"
        ),
    ),
    (Phase.CAPTURING, re.compile(r"Capturing CUDA graph|Capturing cudagraph|Graph capturing finished")),
    (
        Phase.COMPILING,
        re.compile(
            r"Dynamo bytecode transform|Compiling a graph|torch\.compile took|Warming up model for the"
        ),
    ),
    (
        Phase.LOADING,
        re.compile(r"Starting to load model|Loading safetensors|Loading pt checkpoint|Loading weights took"),
    ),
    (Phase.DOWNLOADING, re.compile(r"Fetching \d+ files|\.(?:safetensors|bin|gguf|pt):\s+\d+%|^Downloading")),
)
"""By the message that shows a phase, the latest phase first."""

_PERCENT = re.compile(r"(\d{1,3})%(?: Completed|\|)")
_PREFIX = re.compile(r"^\([^)]*pid=\d+\) ?(?:(?P<level>[A-Z]+) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Killed)(?::|$)")
_COMPLAINT = re.compile(r"^(?:vllm|usage)\b.*\berror: |^error: |command not found|No such file or directory")
_UNIMPORTANT = ("Error retrieving safetensors", "leaked ")


_CONSEQUENCE = re.compile(
    r"[Cc]onnection (?:closed|reset) by peer|remote process (?:exited|has)|EngineDeadError|Worker failed with"
)


@dataclass(slots=True)
class Trouble:
    """The first words of a failure."""

    began_at_s: float
    last_at_s: float
    lines: list[str] = field(default_factory=list)
    """Exceptions and complaints, without their tracebacks, the first ones."""

    @property
    def is_a_consequence(self) -> bool:
        """Whether it only says that another rank, or another process of this one, has gone."""
        return all(_CONSEQUENCE.search(line) for line in self.lines)


class RankLog:
    """Reads one rank's output as it comes."""

    def __init__(self, now_s: float) -> None:
        self.phase = Phase.STARTING
        self.phase_since_s = now_s
        self.percent: int | None = None
        """How far the phase has come, where the rank says so."""
        self.heard_at_s = now_s
        """When it last wrote anything."""
        self.trouble: Trouble | None = None
        """The failure that its last error lines belong to."""
        self._rest = ""

    def feed(self, output: bytes, now_s: float) -> None:
        """Take in output; lines and characters may be cut anywhere. Progress bars end lines with `\\r`."""
        self.heard_at_s = now_s
        *lines, rest = re.split(r"[\r\n]+", self._rest + output.decode(errors="replace"))
        self._rest = rest[:MAX_LINE_CHARS]
        for line in lines:
            self._read(line[:MAX_LINE_CHARS], now_s)

    def _read(self, line: str, now_s: float) -> None:
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        self._note_phase(text, now_s)
        level = prefix["level"] if prefix else None
        if (_EXCEPTION.match(text) or _COMPLAINT.search(text)) and level in (None, "ERROR", "CRITICAL"):
            self._note_trouble(text, now_s)

    def _note_phase(self, text: str, now_s: float) -> None:
        for phase, pattern in _PHASES:
            if pattern.search(text):
                if phase is not self.phase:
                    self.phase, self.phase_since_s, self.percent = phase, now_s, None
                if percent := _PERCENT.search(text):
                    self.percent = int(percent[1])
                return

    def _note_trouble(self, text: str, now_s: float) -> None:
        if any(words in text for words in _UNIMPORTANT):
            return
        trouble = self.trouble
        if trouble is None or now_s - trouble.last_at_s > ERRORS_BELONG_TOGETHER_S:
            trouble = self.trouble = Trouble(now_s, now_s)
        trouble.last_at_s = now_s
        if len(trouble.lines) < MAX_ERROR_LINES and text not in trouble.lines:
            trouble.lines.append(text)

    def describe(self, *, with_percent: bool = True) -> str:
        """The phase, and how far it has come."""
        known = with_percent and self.percent is not None
        return f"{self.phase.value} {self.percent} %" if known else self.phase.value


def describe_together(logs: Mapping[str, RankLog], *, with_percent: bool = True) -> str:
    """One line for all ranks of a group: how many are in which phase; by name where it is one."""
    by_phase: dict[Phase, list[str]] = {}
    for name, log in logs.items():
        by_phase.setdefault(log.phase, []).append(name)
    parts = []
    for phase in Phase:
        names = by_phase.get(phase, [])
        if len(names) == 1 and len(logs) > 1:
            parts.append(f"{names[0]} {logs[names[0]].describe(with_percent=with_percent)}")
        elif names:
            slowest = min(names, key=lambda name: logs[name].percent or 0)
            parts.append(f"{len(names)} {logs[slowest].describe(with_percent=with_percent)}")
    return ", ".join(parts)
