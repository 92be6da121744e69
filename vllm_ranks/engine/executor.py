"""The executor: where vLLM runs the network, this one lets the modelled time pass.

Must never decide what a step costs; `core` says it, and in a group the slowest rank's word counts.
"""

from __future__ import annotations

import asyncio

from vllm_ranks.engine.collective import Collective, Operation

_MAX_CARRIED_S = 0.020
"""Lateness that one step may make up for the one before. Timers and other processes make every sleep end
late; without this the group would be slower than its model, with more it would run in bursts."""


class Executor:
    """Runs the steps of one engine in wall-clock time."""

    def __init__(self, time_scale: float, group: Collective | None) -> None:
        """`time_scale`: model seconds per real second. `group`: `None` for an engine that steps alone."""
        self._time_scale = time_scale
        self._group = group
        self._last_end_s = float("-inf")

    async def execute(self, cost_s: float) -> float:
        """Let one step pass; in a lock-step group it begins when every rank has begun it.

        Returns:
            What the step cost: the largest cost among the ranks of the group, in model seconds.

        Raises:
            CollectiveError: the group is broken.
        """
        loop = asyncio.get_running_loop()
        if self._group is not None:
            cost_s = await self._group.all_reduce(Operation.MAX, cost_s)
        now_s = loop.time()
        start_s = self._last_end_s if now_s - self._last_end_s < _MAX_CARRIED_S else now_s
        self._last_end_s = start_s + cost_s / self._time_scale
        # Also when there is nothing to wait for: requests and aborts must get their turn.
        await asyncio.sleep(max(0.0, self._last_end_s - now_s))
        return cost_s

    async def any_rank_unfinished(self, unfinished: bool) -> bool:
        """The group's agreement: has any rank unfinished work?

        Raises:
            CollectiveError: the group is broken.
        """
        if self._group is None:
            return unfinished
        return await self._group.all_reduce(Operation.SUM, float(unfinished)) > 0

    def idle(self) -> None:
        """The engine waits for work: the next step starts afresh."""
        self._last_end_s = float("-inf")
