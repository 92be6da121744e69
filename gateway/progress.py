"""What the supervisor tells people while it starts, watches and stops: one line per step.

Must never decide anything; the same words go to a terminal, a file or a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Progress:
    """Writes to a terminal, with a spinner for the step under way, or plain lines to anything else."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._under_way: dict[Step, str] = {}
        self._status: Status | None = None

    @property
    def is_live(self) -> bool:
        """Whether people can watch a step while it is under way."""
        return self.console.is_terminal

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """A step, perhaps beside others; end it with `Step.done`. An exception marks it as failed."""
        started_s = time.monotonic()
        step = Step(lambda text: self._show(step, f"{name} … {text}"))
        self._show(step, f"{name} …")
        try:
            yield step
        except Exception:
            self._hide(step)
            self._line("red", "✗", name)
            raise
        finally:
            self._hide(step)
        took_s = time.monotonic() - started_s
        self._line("green", "✓", f"{name}{step.outcome} ({took_s:.1f} s)")

    def _show(self, step: Step, text: str) -> None:
        self._under_way[step] = text
        together = escape("; ".join(self._under_way.values()))
        if self._status is None:
            self._status = self.console.status(together)
            self._status.start()
        else:
            self._status.update(together)

    def _hide(self, step: Step) -> None:
        self._under_way.pop(step, None)
        if self._status is not None and not self._under_way:
            self._status.stop()
            self._status = None

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
