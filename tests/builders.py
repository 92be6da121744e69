"""The vocabulary of the tests: `rank(…)`, `request(…)`, `pool(…)`, `report(…)` in a few plain words."""

from __future__ import annotations

from collections.abc import Sequence

from ext_proc.balancer import Balancer
from ext_proc.ledger import Ledger
from ext_proc.policies import least_loaded
from ext_proc.vocabulary import CallKind, Rank, RankReport, RequestFacts

STALE_AFTER_S = 2.0
DOWN_AFTER_FAILURES = 3


def rank(index: int = 0, *, group: str = "g0") -> Rank:
    """A rank at an address of its own."""
    return Rank(group, index, f"10.0.{sum(group.encode()) % 250}.1:{8000 + index}")


def group(name: str, size: int) -> list[Rank]:
    """The ranks of one group."""
    return [rank(index, group=name) for index in range(size)]


def request(*, request_id: str = "r", prompt_tokens: int = 100, max_tokens: int | None = 16) -> RequestFacts:
    """Facts of a chat request."""
    return RequestFacts(
        kind=CallKind.CHAT,
        request_id=request_id,
        model="m",
        prompt_chars=prompt_tokens * 4,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
    )


def report(at_s: float = 0.0, *, running: int = 0, waiting: int = 0, kv: float = 0.0) -> RankReport:
    """What a rank says at `at_s`."""
    return RankReport(taken_at_s=at_s, running=running, waiting=waiting, kv_cache_usage=kv)


def pool(ranks: Sequence[Rank], *, reported_at_s: float | None = 0.0) -> Ledger:
    """A ledger over `ranks`, each idle by a report of `reported_at_s` (None: never reported)."""
    ledger = Ledger(ranks, stale_after_s=STALE_AFTER_S, down_after_failures=DOWN_AFTER_FAILURES)
    if reported_at_s is not None:
        for one in ranks:
            ledger.record_report(one, report(reported_at_s))
    return ledger


def balancer(ledger: Ledger, *, pick_list_length: int = 3) -> Balancer:
    """The default policy over `ledger`."""
    return Balancer(ledger, least_loaded, pick_list_length=pick_list_length)
