"""The ledger: every reservation plus the last report of each rank, the picture on which picks are made.

Pure: it is told the time and never waits. A reservation is taken by `reserve` and ends by
`Reservation.release`, exactly once; no timer ever frees one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import exp

from ext_proc.vocabulary import Rank, RankReport, RankState, RequestFacts


class Outcome(StrEnum):
    """How a reservation ended."""

    ENDED = "ended"
    """The ext_proc stream ended with the response, or the client went away: Envoy ends both alike."""
    CANCELLED = "cancelled"
    """Envoy reset the stream, or this gateway is shutting down."""
    FAILED = "failed"
    """The gateway itself failed while it handled the stream."""
    RETIRED = "retired"
    """Nobody saw the end: the rank's own reports show that it lies in the past."""


class Reservation:
    """One request placed on one rank, from the pick until the response ends."""

    __slots__ = ("_account", "_ledger", "facts", "opened_at_s", "outcome")

    def __init__(self, ledger: Ledger, account: RankAccount, facts: RequestFacts, now_s: float) -> None:
        self._ledger = ledger
        self._account = account
        self.facts = facts
        self.opened_at_s = now_s
        self.outcome: Outcome | None = None
        """`None` while the reservation is open."""

    @property
    def rank(self) -> Rank:
        """Where the request was placed."""
        return self._account.rank

    def release(self, outcome: Outcome, now_s: float) -> None:
        """End the reservation; calls after the first change nothing."""
        if self.outcome is None:
            self.outcome = outcome
            self._ledger.close(self, self._account, now_s)

    def move(self, endpoint: str) -> None:
        """The rank at `endpoint` serves the request: it counts there from now on.

        An endpoint that is no rank of this ledger changes nothing.
        """
        if self.outcome is None and endpoint != self._account.rank.endpoint:
            self._account = self._ledger.move(self._account, endpoint)

    def leave_unobserved(self, now_s: float) -> None:
        """The stream has ended, the response perhaps not: the rank's reports must show the end."""
        if self.outcome is None:
            self._account.unobserved.append((now_s, self))


class RankAccount:
    """What the ledger knows of one rank. Policies read it; only the ledger writes it."""

    __slots__ = (
        "_own_peak",
        "_own_peak_before",
        "failures_in_a_row",
        "foreign_requests",
        "group",
        "pick_sequence",
        "picks",
        "rank",
        "report",
        "reservations",
        "unobserved",
    )

    def __init__(self, rank: Rank, group: GroupAccount) -> None:
        self.rank = rank
        self.group = group
        self.reservations = 0
        """Open reservations: requests this gateway sent and has not seen end."""
        self.picks = 0
        """Reservations ever taken."""
        self.pick_sequence = 0
        """Position of the last pick of this rank among all picks; orders equals fairly."""
        self.report: RankReport | None = None
        self.foreign_requests = 0
        """Requests in the last report that this gateway's own reservations do not explain."""
        self.failures_in_a_row = 0
        self.unobserved: deque[tuple[float, Reservation]] = deque()
        """Open reservations whose streams have ended, with the time since when, oldest first."""
        self._own_peak = 0
        self._own_peak_before = 0

    def retire_unobserved(self, report: RankReport) -> None:
        """Release unobserved reservations that `report` shows to have ended, oldest first.

        The rank has fewer requests than are open here. A request on its way to the rank, or not yet in its
        lagging gauges, is no proof: only what was left before the report before counts as ended.
        """
        ended = self.reservations - (report.running + report.waiting)
        while ended > 0 and self.unobserved and self.report is not None:
            since_s, reservation = self.unobserved[0]
            if since_s >= self.report.taken_at_s:
                break
            self.unobserved.popleft()
            reservation.release(Outcome.RETIRED, report.taken_at_s)
            ended -= 1

    def open_one(self, pick_sequence: int) -> None:
        """Count one more reservation, the `pick_sequence`-th of the ledger."""
        self.reservations += 1
        self.picks += 1
        self.pick_sequence = pick_sequence
        self._own_peak = max(self._own_peak, self.reservations)

    def record_report(self, report: RankReport) -> None:
        """Take in what the rank says.

        An engine's gauges lag by a step or more, so a request that has just ended may still be in them. What
        counts as foreign is therefore only what exceeds the most reservations open since the report before.
        """
        self.retire_unobserved(report)
        explained = max(self._own_peak, self._own_peak_before)
        self.foreign_requests = max(0, report.running + report.waiting - explained)
        self._own_peak_before, self._own_peak = self._own_peak, self.reservations
        self.report = report
        self.failures_in_a_row = 0


class GroupAccount:
    """What the ledger knows of one group: one failure domain, and one speed (its ranks step together)."""

    __slots__ = ("_observed_at_s", "accounts", "mean_request_s", "name")

    SMOOTHING = 0.1
    """Weight of the newest request in the running mean."""
    FADES_IN_S = 60.0
    """An observation this old counts only 1/e against the mean of all groups."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accounts: list[RankAccount] = []
        self.mean_request_s: float | None = None
        """Running mean of the seconds a request takes here; `None` before the first one ended."""
        self._observed_at_s = 0.0

    def record_duration(self, duration_s: float, now_s: float) -> None:
        """Learn from a request that ended how long requests take on this group."""
        if self.mean_request_s is None:
            self.mean_request_s = duration_s
        else:
            self.mean_request_s += self.SMOOTHING * (duration_s - self.mean_request_s)
        self._observed_at_s = now_s

    def expected_request_s(self, mean_of_groups_s: float, now_s: float) -> float:
        """What is known of this group, fading towards what is known of all.

        Without the fading, a group once seen to be slow would get no request that could show it recovered.
        """
        if self.mean_request_s is None:
            return mean_of_groups_s
        weight = exp(-(now_s - self._observed_at_s) / self.FADES_IN_S)
        return weight * self.mean_request_s + (1 - weight) * mean_of_groups_s


class Ledger:
    """All accounts of one gateway, in the order of its configuration."""

    def __init__(self, ranks: Iterable[Rank], *, stale_after_s: float, down_after_failures: int) -> None:
        """Open an account for each of `ranks`.

        Args:
            ranks: distinct ranks; those with the same group name form a group.
            stale_after_s: age at which a report says nothing about a rank's load any more.
            down_after_failures: failed scrapes in a row after which a rank is down.
        """
        self._stale_after_s = stale_after_s
        self._down_after_failures = down_after_failures
        self._picks = 0
        groups: dict[str, GroupAccount] = {}
        self._by_rank: dict[Rank, RankAccount] = {}
        for rank in ranks:
            group = groups.setdefault(rank.group, GroupAccount(rank.group))
            account = RankAccount(rank, group)
            group.accounts.append(account)
            self._by_rank[rank] = account
        self.accounts: Sequence[RankAccount] = tuple(self._by_rank.values())
        self.groups: Sequence[GroupAccount] = tuple(groups.values())

    def reserve(self, rank: Rank, facts: RequestFacts, now_s: float) -> Reservation:
        """Place a request on a rank. The caller owns the reservation and must release it."""
        account = self._by_rank[rank]
        self._picks += 1
        account.open_one(self._picks)
        return Reservation(self, account, facts, now_s)

    def close(self, reservation: Reservation, account: RankAccount, now_s: float) -> None:
        """Book the end of a reservation; called by `Reservation.release` alone."""
        account.reservations -= 1
        if reservation.outcome is Outcome.ENDED:
            account.group.record_duration(now_s - reservation.opened_at_s, now_s)

    def move(self, account: RankAccount, endpoint: str) -> RankAccount:
        """Count a reservation of `account` on another rank; called by `Reservation.move` alone."""
        moved_to = next((other for other in self.accounts if other.rank.endpoint == endpoint), None)
        if moved_to is None:
            return account
        account.reservations -= 1
        self._picks += 1
        moved_to.open_one(self._picks)
        return moved_to

    def record_report(self, rank: Rank, report: RankReport) -> None:
        """Take in what a rank said about itself."""
        self._by_rank[rank].record_report(report)

    def record_failed_scrape(self, rank: Rank) -> None:
        """Take in that a rank did not answer."""
        self._by_rank[rank].failures_in_a_row += 1

    def state(self, account: RankAccount, now_s: float) -> RankState:
        """What can be said about a rank now."""
        if account.failures_in_a_row >= self._down_after_failures:
            return RankState.DOWN
        if account.report is None:
            return RankState.UNKNOWN
        if now_s - account.report.taken_at_s > self._stale_after_s:
            return RankState.STALE
        return RankState.FRESH

    def is_healthy(self, group: GroupAccount) -> bool:
        """Whether the group may get requests: a group is one failure domain, so every rank must be up."""
        return all(account.failures_in_a_row < self._down_after_failures for account in group.accounts)

    def loads(self, now_s: float) -> list[float]:
        """Requests expected on each rank, in the order of `accounts`.

        Own reservations are exact. Foreign requests are taken from the report, which counts less as it ages
        and nothing at `stale_after_s`; what it no longer says is filled with the mean of what the ranks with
        a fresh report say. So a rank that is unknown or stale is neither idle nor full.
        """
        trust = [self._trust(account, now_s) for account in self.accounts]
        total_trust = sum(trust)
        mean_foreign = (
            sum(t * a.foreign_requests for t, a in zip(trust, self.accounts, strict=True)) / total_trust
            if total_trust > 0
            else 0.0
        )
        return [
            a.reservations + t * a.foreign_requests + (1 - t) * mean_foreign
            for t, a in zip(trust, self.accounts, strict=True)
        ]

    def mean_request_s(self) -> float:
        """Mean over the groups of seconds per request; 1 while no request has ended anywhere."""
        known = [group.mean_request_s for group in self.groups if group.mean_request_s is not None]
        return sum(known) / len(known) if known else 1.0

    def _trust(self, account: RankAccount, now_s: float) -> float:
        if account.report is None:
            return 0.0
        return max(0.0, 1.0 - (now_s - account.report.taken_at_s) / self._stale_after_s)
