"""Power of two choices: the less loaded of two ranks drawn at random.

As vllm-router's `power_of_two` in front of vLLM (vllm-project/router src/policies/power_of_two.rs): the load
it polls for (`/get_load`) does not exist there, so what counts is its own requests in flight; the rank drawn
first wins a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy


class PowerOfTwo(ScorePolicy):
    """The less loaded of two."""

    name: ClassVar[str] = "power_of_two"

    def costs(self, view: PickView) -> Sequence[float]:
        """Requests in flight of the two ranks drawn; the others come after."""
        costs = [inf] * len(view.accounts)
        drawn = view.rng.sample(range(len(costs)), min(2, len(costs)))
        for place, index in enumerate(drawn):
            costs[index] = view.accounts[index].reservations + place / 2
        return costs
