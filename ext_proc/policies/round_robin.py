"""Round robin: each rank in turn, blind to what is on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy


class RoundRobin(ScorePolicy):
    """The rank whose turn it is, then the next ones."""

    name: ClassVar[str] = "round_robin"

    def costs(self, view: PickView) -> Sequence[float]:
        """Turns until the rank's own."""
        ranks = len(view.accounts)
        return [(index - view.pick_number) % ranks for index in range(ranks)]
