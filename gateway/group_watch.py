"""Whether a group still serves, judged from what its ranks show: health, and progress where there is work.

A group is one failure domain: one rank that is dead or hangs takes all with it. `/health` alone does not
tell: vLLM answers 200 while an engine hangs in a collective (vllm-project/vllm#36451). So a rank that has
work must also make progress. Pure: is told everything, with the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ext_proc.vocabulary import Rank, RankReport

MISSED_HEALTH_LIMIT = 3
"""A rank under full load may answer late, so one answer that does not come means nothing."""
SILENCE_FACTOR = 1.4
"""For the same reason no report for a while says less than reports without progress: it may last longer."""


class Verdict(StrEnum):
    """What is wrong with a group."""

    DEAD = "dead"
    """A rank's engine or its server has ended, or it has not started yet."""
    HUNG = "hung"
    """A rank has work and makes no progress, or answers with errors or not at all; that may pass."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a group must get no requests."""

    verdict: Verdict
    rank: Rank
    since_s: float
    """When it began to show."""
    reason: str


@dataclass(slots=True)
class _Signs:
    """What one rank has shown."""

    dead_since_s: float | None = None
    death: str = ""
    missed_health: int = 0
    missed_since_s: float = 0.0
    engine_steps: int | None = None
    progressed_at_s: float = 0.0
    reported_at_s: float = 0.0
    busy_since_s: float | None = None
    """Since when its reports say, without a break, that it has requests."""
    hung: Trouble | None = None
    """Kept until the rank shows life: what it reports meanwhile may be as old as the hang."""
    failing: Trouble | None = None
    """Kept until the rank answers a request: it makes steps, but not for new requests."""


class GroupWatch:
    """Watches the ranks of one group."""

    def __init__(self, ranks: Iterable[Rank], *, hang_after_s: float) -> None:
        """`hang_after_s`: how long a rank with work may report no progress."""
        self._hang_after_s = hang_after_s
        self._signs = {rank: _Signs() for rank in ranks}
        self._could_see_since_s = float("-inf")

    # --- What is seen --------------------------------------------------------------------------------

    def saw_health(self, rank: Rank, status: int, now_s: float) -> None:
        """`/health` was answered with this HTTP status."""
        signs = self._signs[rank]
        signs.missed_health = 0
        if status == 200:
            signs.dead_since_s = None
        else:
            self._died(signs, f"/health answers {status}", now_s)

    def saw_refusal(self, rank: Rank, now_s: float) -> None:
        """Nobody listens on the rank's port, or the connection broke."""
        self._died(self._signs[rank], "nothing answers on its port", now_s)

    def missed_health(self, rank: Rank, now_s: float) -> None:
        """`/health` was not answered in time."""
        signs = self._signs[rank]
        if signs.missed_health == 0:
            signs.missed_since_s = now_s
        signs.missed_health += 1

    def saw_report(self, rank: Rank, report: RankReport) -> None:
        """The rank has told its counters and gauges."""
        signs, now_s = self._signs[rank], report.taken_at_s
        signs.reported_at_s = now_s
        if report.engine_steps is not None and report.engine_steps != signs.engine_steps:
            signs.engine_steps, signs.progressed_at_s = report.engine_steps, now_s
            signs.hung = None
        if report.running + report.waiting == 0:
            signs.busy_since_s = None
        elif signs.busy_since_s is None:
            signs.busy_since_s = now_s

    def was_blind(self, now_s: float) -> None:
        """Until now this process had no time to look: that nothing was heard says nothing."""
        self._could_see_since_s = now_s

    def saw_failed_request(self, rank: Rank, failure: str, now_s: float) -> None:
        """A request to the rank, asked to see whether it lives, has failed."""
        signs = self._signs[rank]
        if signs.failing is None and signs.dead_since_s is None:
            signs.failing = Trouble(Verdict.HUNG, rank, now_s, f"rank {rank.name}: {failure}")

    def saw_life(self, rank: Rank, now_s: float) -> None:
        """The rank has answered a request."""
        signs = self._signs[rank]
        signs.progressed_at_s = now_s
        signs.hung = signs.failing = None

    @staticmethod
    def _died(signs: _Signs, death: str, now_s: float) -> None:
        signs.death = death
        if signs.dead_since_s is None:
            signs.dead_since_s = now_s
        signs.missed_health = 0
        signs.hung = signs.failing = None

    # --- What it means -------------------------------------------------------------------------------

    def trouble(self, now_s: float, waiting_since_s: Mapping[Rank, float]) -> Trouble | None:
        """What is wrong with the group, if anything; a death before a hang.

        Args:
            now_s: the time.
            waiting_since_s: for ranks with requests of which nothing has been seen yet: since when the oldest
                of these is there.
        """
        dead = [self._death(rank, signs) for rank, signs in self._signs.items()]
        hung = [
            self._hang(rank, signs, waiting_since_s.get(rank), now_s) for rank, signs in self._signs.items()
        ]
        found = [trouble for trouble in (*dead, *hung) if trouble is not None]
        return min(
            found, key=lambda trouble: (trouble.verdict is Verdict.HUNG, trouble.since_s), default=None
        )

    def suspects(self) -> list[Rank]:
        """Ranks that must answer a request, or make progress if they only hang, before they serve again."""
        return [rank for rank, signs in self._signs.items() if signs.hung or signs.failing]

    @staticmethod
    def _death(rank: Rank, signs: _Signs) -> Trouble | None:
        if signs.dead_since_s is None:
            return None
        return Trouble(Verdict.DEAD, rank, signs.dead_since_s, f"rank {rank.name}: {signs.death}")

    def _hang(self, rank: Rank, signs: _Signs, waiting_since_s: float | None, now_s: float) -> Trouble | None:
        if signs.dead_since_s is not None:
            return None
        if signs.failing is not None:
            return signs.failing
        if signs.hung is None and signs.missed_health >= MISSED_HEALTH_LIMIT:
            missed = f"rank {rank.name}: /health was not answered {signs.missed_health} times in a row"
            return Trouble(Verdict.HUNG, rank, signs.missed_since_s, missed)
        if signs.hung is not None or signs.engine_steps is None:
            return signs.hung
        # A request that came before the last progress may have had its part of it.
        idle_engine_asked = waiting_since_s is not None and waiting_since_s > signs.progressed_at_s
        if signs.busy_since_s is None and not idle_engine_asked:
            return None
        starts = [start for start in (signs.busy_since_s, waiting_since_s) if start is not None]
        since_s = max(signs.progressed_at_s, min(starts))
        reason = None
        if signs.reported_at_s - since_s >= self._hang_after_s:
            reason = f"no step of its engine for {signs.reported_at_s - since_s:.1f} s, with requests on it"
        elif now_s - self._silent_since_s(signs, since_s) >= SILENCE_FACTOR * self._hang_after_s:
            reason = f"no report for {now_s - signs.reported_at_s:.1f} s, with requests on it"
        if reason is not None:
            signs.hung = Trouble(Verdict.HUNG, rank, since_s, f"rank {rank.name}: {reason}")
        return signs.hung

    def _silent_since_s(self, signs: _Signs, since_s: float) -> float:
        return max(signs.reported_at_s, since_s, self._could_see_since_s)
