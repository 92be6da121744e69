"""Round robin: each rank in turn, blind to what is on it.

It is the turn of the rank picked longest ago: counted over all picks instead, two models asked in turn would
each get every second of their ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy


class RoundRobin(ScorePolicy):
    """The rank whose turn it is, then the next ones."""

    name: ClassVar[str] = "round_robin"

    def costs(self, view: PickView) -> Sequence[float]:
        """When the rank was last picked, as a position among all picks; of those never picked, the first."""
        return [account.pick_sequence for account in view.accounts]
