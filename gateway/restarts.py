"""When something that failed is started again: later after each failure in a row, in the end not at all.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How patient to be."""

    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    stable_after_s: float = 60.0
    """What has served this long before it fails starts afresh."""
    max_in_a_row: int | None = None
    """Failures in a row after which it is given up; `None`: never."""


class Restarts:
    """The failures in a row of one thing."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self.failures_in_a_row = 0

    def failed(self, served_s: float) -> float | None:
        """It failed after serving for `served_s` (0: it did not start).

        Returns the seconds to wait before it is started again; `None`: it is given up.
        """
        limits = self._limits
        self.failures_in_a_row = 1 if served_s >= limits.stable_after_s else self.failures_in_a_row + 1
        if limits.max_in_a_row is not None and self.failures_in_a_row >= limits.max_in_a_row:
            return None
        # The exponent is bounded: endless failures must not overflow a float.
        doublings = min(self.failures_in_a_row - 1, 64)
        return float(min(limits.first_backoff_s * 2.0**doublings, limits.max_backoff_s))
