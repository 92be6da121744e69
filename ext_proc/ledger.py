"""The ledger: every reservation plus the last report of each rank, the picture on which picks are made.

Pure: it is told the time and never waits. No timer ever frees a reservation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ext_proc.accounts import RankAccount
from ext_proc.cache_events import BlocksStored, CacheEvent
from ext_proc.groups import GroupAccount, GroupFacts
from ext_proc.output_lengths import OutputLengths
from ext_proc.pools import Pools
from ext_proc.prefix_index import matched_blocks_each
from ext_proc.reservation import Outcome, Reservation
from ext_proc.sessions import Sessions
from ext_proc.settings import LedgerSettings, Targets
from ext_proc.vocabulary import Rank, RankCounters, RankReport, RankState, RequestFacts

LATE_FACTOR = 1.5
"""A prefill is assumed done when it has taken this many times what it should …"""
LATE_GRACE_S = 0.5
"""… and this much longer, in which reports of it could have come."""


class Ledger:
    """All accounts of one gateway, in the order of its configuration."""

    def __init__(
        self,
        ranks: Iterable[Rank],
        group_facts: Mapping[str, GroupFacts],
        settings: LedgerSettings,
        targets: Targets,
    ) -> None:
        """Open an account for each of `ranks`, which must be distinct, and each of their groups."""
        self._settings = settings
        self.picks = 0
        """Reservations ever taken."""
        self._open_by_request: dict[str, set[Reservation]] = {}
        """Open reservations by the ids of their requests, which clients choose: several may have one."""
        self.output_lengths = OutputLengths()
        self.sessions = Sessions(settings.max_sessions)
        groups: dict[str, GroupAccount] = {}
        self._by_rank: dict[Rank, RankAccount] = {}
        for rank in ranks:
            if rank.group not in groups:
                groups[rank.group] = GroupAccount(
                    group_facts[rank.group], targets, stale_after_s=settings.stale_after_s
                )
            group = groups[rank.group]
            account = RankAccount(rank, group, settings)
            group.accounts.append(account)
            self._by_rank[rank] = account
        self.accounts: Sequence[RankAccount] = tuple(self._by_rank.values())
        self.groups: Sequence[GroupAccount] = tuple(groups.values())
        self.pools = Pools(self.groups)
        self._none_late_before_s = 0.0
        """No prefill is overdue before that, by what was known when they were last looked at."""
        self.availability = 0
        """Changes whenever a group's rotation or health does."""
        self._foreign_requests = 0
        """Of all ranks together, by their last reports."""
        self._cached: tuple[RequestFacts, Sequence[RankAccount], list[int]] | None = None
        """The last question to `cached_tokens_each` and its answer, as long as no index has changed."""

    # --- Reservations --------------------------------------------------------------------------------

    def reserve(self, rank: Rank, facts: RequestFacts, now_s: float) -> Reservation:
        """Place a request on a rank. The caller owns the reservation and must release it."""
        self.pass_time(now_s)
        reservation = Reservation(self, self._by_rank[rank], facts, now_s)
        self._open_by_request.setdefault(facts.request_id, set()).add(reservation)
        self._open(reservation, now_s)
        return reservation

    def close(self, reservation: Reservation, now_s: float) -> None:
        """Book the end of a reservation; called by `Reservation.release` alone."""
        self.pass_time(now_s)
        if reservation.outcome is Outcome.ENDED and reservation.first_token_step is not None:
            generated = reservation.account.group.steps - reservation.first_token_step + 1
            self.output_lengths.record(reservation.facts, max(1, round(generated)))
        request_id = reservation.facts.request_id
        of_same_id = self._open_by_request[request_id]
        of_same_id.remove(reservation)
        if not of_same_id:
            del self._open_by_request[request_id]
        self._leave(reservation, now_s)

    def move(self, reservation: Reservation, endpoint: str, now_s: float) -> None:
        """Count a reservation on another rank; called by `Reservation.move` alone."""
        account = next((account for account in self.accounts if account.rank.endpoint == endpoint), None)
        if account is not None:
            self.pass_time(now_s)
            self._leave(reservation, now_s)
            if reservation.account.forget_unobserved(reservation):
                account.unobserved.append((now_s, reservation))
            reservation.account = account
            self._open(reservation, now_s)

    def note_retry(self, request_id: str, endpoint: str, now_s: float) -> None:
        """A request is sent to the rank at `endpoint`, since the one before has refused it.

        Nothing changes if there is no such request, or several: then it cannot be told which one it is.
        """
        of_this_id = self._open_by_request.get(request_id, ())
        if len(of_this_id) == 1:
            (reservation,) = of_this_id
            reservation.move(endpoint, now_s)

    def _open(self, reservation: Reservation, now_s: float) -> None:
        account, facts = reservation.account, reservation.facts
        (cached_tokens,) = self.cached_tokens_each((account,), facts)
        reservation.uncached_tokens = facts.prompt_tokens - cached_tokens
        reservation.first_token_step = None
        reservation.placed_at_s = now_s
        self.picks += 1
        account.open_one(reservation, self.picks)
        account.prefills.push(reservation, reservation.uncached_tokens, now_s)
        account.cache.expect(account.cache.blocks_of(facts, self._adapter(facts)))
        if facts.session is not None:
            self.sessions.note(facts.session, account)
        self._cached = None
        account.group.note_phase(now_s)

    def _leave(self, reservation: Reservation, now_s: float) -> None:
        account, group, facts = reservation.account, reservation.account.group, reservation.facts
        if reservation.first_token_step is None:
            # Ended between two reports: if there was time for it, its first token is in the next one.
            prefill_s = reservation.uncached_tokens / group.prefill_tokens_per_s
            had_first_token = (
                reservation.outcome is Outcome.ENDED and now_s - reservation.placed_at_s >= prefill_s
            )
            account.prefills.leave(reservation, now_s, had_first_token=had_first_token)
            self._settle(reservation, is_computed=False)
            group.note_phase(now_s)
        else:
            account.stop_decoding(facts.n, reservation.first_token_step)
            group.guesses -= reservation.is_guess
        account.close_one(reservation)

    # --- Reports -------------------------------------------------------------------------------------

    def record_report(self, rank: Rank, report: RankReport) -> None:
        """Take in what a rank said about itself."""
        now_s = report.taken_at_s
        self.pass_time(now_s)
        account = self._by_rank[rank]
        before = account.report
        self._retire_unobserved(account, report)
        if account.failures_in_a_row >= self._settings.down_after_failures:
            account.group.ranks_down -= 1
            self.availability += 1
        self._foreign_requests -= account.foreign_requests
        account.record_report(report)
        self._foreign_requests += account.foreign_requests
        self.pools.note_adapters(account.group, report.adapters)
        if report.counters is None or before is None or before.counters is None:
            return
        if report.counters.is_restart_of(before.counters):
            for lost in account.prefills.clear():
                self._first_token(lost.owner, is_guess=True)
            account.cache.note_restart()
            self._cached = None
            account.group.note_phase(now_s)
            return
        account.cache.note_report()
        self._record_progress(account, before.counters, report.counters, before.taken_at_s, now_s)

    def _retire_unobserved(self, account: RankAccount, report: RankReport) -> None:
        """Release unobserved reservations that `report` shows to have ended, oldest first.

        The rank has fewer requests than are open here. A request on its way to the rank, or not yet in its
        lagging gauges, is no proof: only what was left before the report before counts as ended.
        """
        ended = account.reservations - (report.running + report.waiting)
        while ended > 0 and account.unobserved and account.report is not None:
            since_s, reservation = account.unobserved[0]
            if since_s >= account.report.taken_at_s:
                break
            account.unobserved.popleft()
            reservation.release(Outcome.RETIRED, report.taken_at_s)
            ended -= 1

    def record_cache_events(self, rank: Rank, events: Sequence[CacheEvent]) -> None:
        """Take in what a rank says has happened to its prefix cache."""
        account = self._by_rank[rank]
        adapters = {
            one.adapter for one in events if isinstance(one, BlocksStored) and one.adapter is not None
        }
        self.pools.note_adapters(account.group, adapters)
        account.cache.apply(events, account.prefills.tokens)
        self._cached = None

    def forget_cache_events(self, rank: Rank, *, all_to_come: bool) -> None:
        """What a rank said of its prefix cache so far is void.

        `all_to_come`: what it will say begins with an empty cache.
        """
        self._by_rank[rank].cache.forget_events(all_to_come=all_to_come)
        self._cached = None

    def record_failed_scrape(self, rank: Rank) -> None:
        """Take in that a rank did not answer."""
        account = self._by_rank[rank]
        account.failures_in_a_row += 1
        if account.failures_in_a_row == self._settings.down_after_failures:
            account.group.ranks_down += 1
            self.availability += 1

    def _record_progress(
        self, account: RankAccount, before: RankCounters, after: RankCounters, since_s: float, now_s: float
    ) -> None:
        group = account.group
        group.note_tokens(before, after, now_s)
        group.learn_step(before, after, since_s, now_s)
        first_tokens = after.first_tokens - before.first_tokens
        # Some time since the last report; half-way is right on average.
        seen_s = (since_s + now_s) / 2
        head = account.prefills.head(seen_s)
        done = account.prefills.first_tokens_reported(first_tokens, seen_s)
        for prefill in done:
            self._first_token(prefill.owner)
        if done and head is not None:
            # Several may have ended since the last report; only their sum is known.
            group.learn_prefill(after.computed_prompt_tokens - before.computed_prompt_tokens, head[1])
        if first_tokens:
            group.note_phase(now_s)

    def _first_token(self, reservation: Reservation, *, is_guess: bool = False) -> None:
        group = reservation.account.group
        reservation.is_guess = is_guess
        group.guesses += is_guess
        reservation.first_token_step = group.steps
        reservation.account.start_decoding(reservation.facts.n, group.steps)
        self._settle(reservation, is_computed=not is_guess)

    def _settle(self, reservation: Reservation, *, is_computed: bool) -> None:
        """The reservation's prompt is computed, for certain if `is_computed`, or will not be."""
        cache, facts = reservation.account.cache, reservation.facts
        if cache.is_exact:
            cache.settle(cache.blocks_of(facts, self._adapter(facts)), is_computed=is_computed)
            self._cached = None

    def _adapter(self, facts: RequestFacts) -> str | None:
        return facts.model if self.pools.is_adapter(facts.model) else None

    def pass_time(self, now_s: float) -> None:
        """Let the model of step times run on to `now_s`."""
        for group in self.groups:
            group.pass_time(now_s)

    def assume_progress(self, now_s: float) -> None:
        """Let the model of step times end prefills that are long overdue.

        Either no report comes, or the counter was misread: a first token from before the first report, or one
        of somebody else's. Without this, a queue would stay one too long until its last request ends.
        """
        if now_s < self._none_late_before_s:
            return
        self._none_late_before_s = now_s + LATE_GRACE_S
        for account in self.accounts:
            head = account.prefills.head(now_s)
            if head is None:
                continue
            prefill, elapsed_s = head
            # The whole prompt: it may not have been in the rank's cache after all.
            expected_s = prefill.owner.facts.prompt_tokens / account.group.prefill_tokens_per_s
            left_s = LATE_FACTOR * expected_s + LATE_GRACE_S - elapsed_s
            if left_s < 0:
                self._first_token(account.prefills.assume_head_done(now_s).owner, is_guess=True)
                account.group.note_phase(now_s)
            else:
                self._none_late_before_s = min(self._none_late_before_s, now_s + left_s)

    # --- What can be read off ------------------------------------------------------------------------

    def cached_tokens_each(self, accounts: Sequence[RankAccount], facts: RequestFacts) -> list[int]:
        """Prompt tokens each rank probably has in its cache; never all, since the last is always computed."""
        if self._cached is not None and self._cached[0] is facts and self._cached[1] is accounts:
            return self._cached[2]
        if facts.tokens is not None:
            adapter = self._adapter(facts)
            cached = [account.cache.cached_tokens(facts, adapter) for account in accounts]
        else:
            block_tokens, most = self._settings.block_tokens, max(0, facts.prompt_tokens - 1)
            matches = matched_blocks_each([a.cache.index for a in accounts], facts.prompt_blocks)
            cached = [min(matched * block_tokens, most) if matched else 0 for matched in matches]
        self._cached = (facts, accounts, cached)
        return cached

    def state(self, account: RankAccount, now_s: float) -> RankState:
        """What can be said about a rank now."""
        if account.failures_in_a_row >= self._settings.down_after_failures:
            return RankState.DOWN
        if account.report is None:
            return RankState.UNKNOWN
        if now_s - account.report.taken_at_s > self._settings.stale_after_s:
            return RankState.STALE
        return RankState.FRESH

    def set_rotation(self, name: str, in_rotation: bool) -> None:
        """Whether the group of this name may get new requests, however healthy it looks."""
        for group in self.groups:
            if group.name == name:
                group.in_rotation = in_rotation
        self.availability += 1

    def placed_after_s(self, rank: Rank, time_s: float) -> float | None:
        """When the oldest open request came that was placed on a rank after `time_s`; `None`: none was."""
        return self._by_rank[rank].placed_after_s(time_s)

    def foreign_requests(self, accounts: Sequence[RankAccount], now_s: float) -> list[float]:
        """Requests of others expected on each of these ranks.

        A report counts less as it ages and nothing at `stale_after_s`; what it no longer says is filled with
        the mean of what the ranks with a fresh report say. So a rank that is unknown or stale is neither idle
        nor full.
        """
        if self._foreign_requests == 0:
            return [0.0] * len(accounts)
        trust = [self._trust(account, now_s) for account in accounts]
        total_trust = sum(trust)
        if total_trust == 0:
            return [0.0] * len(trust)
        mean = sum(t * a.foreign_requests for t, a in zip(trust, accounts, strict=True)) / total_trust
        return [t * a.foreign_requests + (1 - t) * mean for t, a in zip(trust, accounts, strict=True)]

    def loads(self, now_s: float) -> list[float]:
        """Requests expected on each rank: own reservations, which are exact, and those of others."""
        return [
            account.reservations + foreign
            for account, foreign in zip(
                self.accounts, self.foreign_requests(self.accounts, now_s), strict=True
            )
        ]

    def _trust(self, account: RankAccount, now_s: float) -> float:
        if account.report is None:
            return 0.0
        return max(0.0, 1.0 - (now_s - account.report.taken_at_s) / self._settings.stale_after_s)
