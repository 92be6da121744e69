"""What the supervisor tells people while it starts, watches and stops: one line per step.

Must never decide anything; the same words go to a terminal, a file or a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


class Progress:
    """Writes to a terminal, with a spinner for the step under way, or plain lines to anything else."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """A step under way; end it with `Step.done`. An exception marks it as failed."""
        started_s = time.monotonic()
        with self.console.status(escape(f"{name} …")) as status:
            step = Step(lambda text: status.update(escape(f"{name} … {text}")))
            try:
                yield step
            except Exception:
                self._line("red", "✗", name)
                raise
        took_s = time.monotonic() - started_s
        self._line("green", "✓", f"{name}{step.outcome} ({took_s:.1f} s)")

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self._line("cyan", "·", text)

    def problem(self, text: str) -> None:
        """Something that went wrong; may have several lines."""
        self._line("red", "!", text)

    def _line(self, color: str, mark: str, text: str) -> None:
        self.console.print(f"[{color}]{mark}[/{color}] {escape(text)}", highlight=False, soft_wrap=True)


class Step:
    """One step of a start or stop."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        """Says how far it has come."""
        self.outcome = ""

    def done(self, outcome: str) -> None:
        """What it came to, e.g. `ready on 127.0.0.1:8080`."""
        self.outcome = f": {outcome}"
