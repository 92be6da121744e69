"""Whether a group still serves, judged from what its ranks show: health, and progress where there is work.

A group is one failure domain: one rank that is dead or hangs takes all with it. `/health` alone does not
tell: vLLM answers 200 while an engine hangs in a collective (vllm-project/vllm#36451). So a rank that has
work must also make progress. That a request was sent to it does not mean that it has work: the body may still
be arriving, an image be fetched. One whose reports do not say that it runs any is only doubted, and must be
asked. Pure: is told everything, with the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ext_proc.vocabulary import Rank, RankReport

MISSED_HEALTH_LIMIT = 3
"""A rank under full load may answer late, so one answer that does not come means nothing."""
SILENCE_FACTOR = 1.4
"""For the same reason no report for a while says less than reports without progress: it may last longer."""
DOUBT_SHARE = 0.25
"""After this share of the time for which a rank with work may stand still, one that may have none is asked:
that costs little, and the answer may take all of that time again."""

Placed = Callable[[Rank, float], float | None]
"""Tells when the oldest open request came that was placed on a rank after a time; `None`: none was."""


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
    engine: tuple[int, int, int, float] | None = None
    """What only a step of the engine changes; `None`: it does not count its steps."""
    progressed_at_s: float = 0.0
    """When progress was reported last, or an answer came …"""
    progressed_after_s: float = 0.0
    """… and when nothing of it had been reported yet: it happened in between."""
    reported_at_s: float = 0.0
    running_since_s: float | None = None
    """Since when its reports say, without a break, that it runs requests."""
    waiting_since_s: float | None = None
    """Since when they say that it runs none, but that some wait: for a grammar, or for KV from elsewhere."""
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
        before_s, signs.reported_at_s = signs.reported_at_s, now_s
        if report.engine_steps is not None:
            # vLLM 0.32 counts a step only if some request gets a token from it, which those that compute the
            # first chunks of a prompt do not; but each takes KV memory, and the gauges are set by every step.
            engine = (report.engine_steps, report.running, report.waiting, report.kv_cache_usage)
            if engine != signs.engine:
                signs.engine, signs.progressed_after_s, signs.progressed_at_s = engine, before_s, now_s
                signs.hung = None
        is_waiting = report.waiting > 0 and report.running == 0
        signs.running_since_s = _since(signs.running_since_s, now_s) if report.running > 0 else None
        signs.waiting_since_s = _since(signs.waiting_since_s, now_s) if is_waiting else None

    def was_blind(self, now_s: float) -> None:
        """Until now this process had no time to look: that nothing was heard says nothing."""
        self._could_see_since_s = now_s

    def saw_failed_request(self, rank: Rank, failure: str, now_s: float) -> None:
        """A request to the rank, asked to see whether it lives, has failed."""
        signs = self._signs[rank]
        if signs.failing is None and signs.dead_since_s is None:
            signs.failing = Trouble(Verdict.HUNG, rank, now_s, f"rank {rank.name}: {failure}")

    def saw_late_request(self, rank: Rank, failure: str, asked_at_s: float) -> None:
        """Such a request has not been answered in time: a busy rank may be late, but not without a step."""
        signs = self._signs[rank]
        stands_still = signs.engine is not None and signs.progressed_at_s < asked_at_s
        if stands_still and self._could_see_since_s < asked_at_s and signs.dead_since_s is None:
            reason = f"rank {rank.name}: {failure}, and its engine has made no step since"
            signs.hung = signs.hung or Trouble(Verdict.HUNG, rank, asked_at_s, reason)

    def saw_life(self, rank: Rank, now_s: float) -> None:
        """The rank has answered a request."""
        signs = self._signs[rank]
        signs.progressed_after_s = signs.progressed_at_s = now_s
        signs.hung = signs.failing = None

    @staticmethod
    def _died(signs: _Signs, death: str, now_s: float) -> None:
        signs.death = death
        if signs.dead_since_s is None:
            signs.dead_since_s = now_s
        signs.missed_health = 0
        signs.hung = signs.failing = None

    # --- What it means -------------------------------------------------------------------------------

    def trouble(self, now_s: float, placed: Placed) -> Trouble | None:
        """What is wrong with the group, if anything; a death before a hang."""
        dead = [self._death(rank, signs) for rank, signs in self._signs.items()]
        hung = [self._hang(rank, signs, placed, now_s) for rank, signs in self._signs.items()]
        found = [trouble for trouble in (*dead, *hung) if trouble is not None]
        return min(
            found, key=lambda trouble: (trouble.verdict is Verdict.HUNG, trouble.since_s), default=None
        )

    def suspects(self) -> list[Rank]:
        """Ranks that must answer a request, or make progress if they only hang, before they serve again."""
        return [rank for rank, signs in self._signs.items() if signs.hung or signs.failing]

    def doubts(self, placed: Placed) -> list[Rank]:
        """Ranks that should have begun with a request by now, if it has reached them: ask each."""
        return [rank for rank, signs in self._signs.items() if self._is_doubtful(rank, signs, placed)]

    def _is_doubtful(self, rank: Rank, signs: _Signs, placed: Placed) -> bool:
        if signs.engine is None or signs.dead_since_s is not None or signs.running_since_s is not None:
            return False
        since_s = self._has_work_since_s(rank, signs, placed)
        return since_s is not None and signs.reported_at_s - since_s >= DOUBT_SHARE * self._hang_after_s

    @staticmethod
    def _death(rank: Rank, signs: _Signs) -> Trouble | None:
        if signs.dead_since_s is None:
            return None
        return Trouble(Verdict.DEAD, rank, signs.dead_since_s, f"rank {rank.name}: {signs.death}")

    def _hang(self, rank: Rank, signs: _Signs, placed: Placed, now_s: float) -> Trouble | None:
        if signs.dead_since_s is not None:
            return None
        if signs.failing is not None:
            return signs.failing
        if signs.hung is None and signs.missed_health >= MISSED_HEALTH_LIMIT:
            missed = f"rank {rank.name}: /health was not answered {signs.missed_health} times in a row"
            return Trouble(Verdict.HUNG, rank, signs.missed_since_s, missed)
        if signs.hung is not None or signs.engine is None:
            return signs.hung
        since_s = self._has_work_since_s(rank, signs, placed)
        if since_s is None:
            return None
        reason = None
        if signs.running_since_s is not None and signs.reported_at_s - since_s >= self._hang_after_s:
            reason = f"no step of its engine for {signs.reported_at_s - since_s:.1f} s, with requests on it"
        elif now_s - self._silent_since_s(signs, since_s) >= SILENCE_FACTOR * self._hang_after_s:
            reason = f"no report for {now_s - signs.reported_at_s:.1f} s, with requests on it"
        if reason is not None:
            signs.hung = Trouble(Verdict.HUNG, rank, since_s, f"rank {rank.name}: {reason}")
        return signs.hung

    @staticmethod
    def _has_work_since_s(rank: Rank, signs: _Signs, placed: Placed) -> float | None:
        """Since when it has, or may have, requests and has made no progress; `None`: it has none."""
        if signs.running_since_s is not None:
            return max(signs.progressed_at_s, signs.running_since_s)
        # A request that came before the last progress has had its part of it.
        starts = (signs.waiting_since_s, placed(rank, signs.progressed_after_s))
        known = [start for start in starts if start is not None]
        return max(signs.progressed_at_s, min(known)) if known else None

    def _silent_since_s(self, signs: _Signs, since_s: float) -> float:
        return max(signs.reported_at_s, since_s, self._could_see_since_s)


def _since(before_s: float | None, now_s: float) -> float:
    return now_s if before_s is None else before_s
