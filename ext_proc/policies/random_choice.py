"""Uniformly random: the baseline below which nobody should fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy


class RandomChoice(ScorePolicy):
    """Any rank."""

    name: ClassVar[str] = "random"

    def costs(self, view: PickView) -> Sequence[float]:
        """A draw per rank."""
        return [view.rng.random() for _ in view.accounts]
