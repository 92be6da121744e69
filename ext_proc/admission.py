"""When a request is placed: now, or held until it costs the others less, or refused because too many wait.

The pick is made when a request is let go, not when it arrives, so it knows what has happened meanwhile. Pure:
the caller tells the time, calls again when `next_wake_s` says, and passes the decisions on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ext_proc.accounts import RankAccount
from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.groups import GroupAccount
from ext_proc.ledger import Ledger
from ext_proc.phases import PhaseGate
from ext_proc.picker import Busy, Picker, Readiness, Readinesses
from ext_proc.settings import AdmissionSettings
from ext_proc.vocabulary import Pick, RankCost, RankState, RequestFacts
from ext_proc.waiting_room import Held, WaitingRoom

TICK_S = 0.01
"""How often held requests are looked at again while nothing else happens."""
LOOK_AGAIN_S = 0.25
"""How long a request keeps waiting for one busy rank before all are compared again."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What would be decided about a request."""

    outcome: Pick | Busy | Refused | None
    """`Busy`: held for that rank; `None`: held until a phase, or until a rank is open to it."""
    ranks: tuple[tuple[RankCost, Readiness], ...]
    """Of all ranks it may go to, the cheapest first."""


class Admission:
    """Lets requests go to the ranks of one ledger."""

    def __init__(self, ledger: Ledger, picker: Picker, settings: AdmissionSettings) -> None:
        self._ledger = ledger
        self._picker = picker
        self._settings = settings if picker.policy.holds else settings.never_holding()
        self._gates: dict[GroupAccount, PhaseGate] = {
            group: PhaseGate(group) for group in ledger.groups if self._settings.phases and group.lock_step
        }
        self._decided: list[Held] = []
        self._waiting = WaitingRoom(
            max_requests=settings.max_held_requests, max_tokens=settings.max_held_tokens
        )

    @property
    def held_requests(self) -> int:
        """Requests waiting now."""
        return len(self._waiting)

    @property
    def held_tokens(self) -> int:
        """Their prompt tokens."""
        return self._waiting.tokens

    def decide(self, facts: RequestFacts, now_s: float) -> Placed | Refused | Held:
        """Decide about a request that has just arrived, or hold it."""
        accounts, _ = self._picker.candidates(facts)
        if not accounts:
            return self._no_rank(facts)
        if not self._waiting.has_room(facts):
            return self._full()
        held = self._waiting.enter(facts, now_s)
        held.uncached_tokens = self._least_uncached(facts, accounts)
        self.advance(now_s)
        if held.decision is None:
            return held
        self._decided.remove(held)
        return held.decision

    def advance(self, now_s: float) -> None:
        """Decide what can be decided now: call after an end or a report, and at `next_wake_s`."""
        self._ledger.pass_time(now_s)
        self._ledger.assume_progress(now_s)
        if self._waiting:
            self._let_go(now_s)
        for gate in self._gates.values():
            if self._waiting:
                self._start_phase(gate, now_s)
        for held in list(self._waiting):
            if now_s + TICK_S > held.arrived_s + self._settings.max_hold_s:
                self._decide_overdue(held, now_s)

    def prospect(self, facts: RequestFacts, now_s: float) -> Prospect:
        """What would be decided about a request now, and why. It is neither held nor reserved."""
        self._ledger.pass_time(now_s)
        accounts, _ = self._picker.candidates(facts)
        if not accounts:
            return Prospect(self._no_rank(facts), ())
        readiness = self._readiness(self._rooms(now_s), now_s, self._settings.backlog_s)
        ranks = [
            (cost, readiness(account, facts.prompt_tokens - cost.cached_tokens))
            for cost, account in zip(self._picker.costs(facts, now_s), accounts, strict=True)
        ]
        outcome = (
            self._picker.pick(facts, now_s, readiness) if self._waiting.has_room(facts) else self._full()
        )
        return Prospect(outcome, tuple(sorted(ranks, key=lambda entry: entry[0].cost)))

    def take_decided(self) -> list[Held]:
        """Held requests that have been decided since the last call."""
        decided, self._decided = self._decided, []
        return decided

    def next_wake_s(self, now_s: float) -> float | None:
        """When to call `advance` again if nothing happens before; `None`: not at all."""
        return now_s + TICK_S if self._waiting else None

    # --- Letting go ----------------------------------------------------------------------------------

    def _let_go(self, now_s: float) -> None:
        """Place what may go at any time: where no phases are needed, or beside the prefills under way."""
        rooms = self._rooms(now_s)
        if not self._someone_is_ready(rooms, now_s):
            return
        readiness = self._readiness(rooms, now_s, self._settings.backlog_s)
        for held in self._in_order(now_s):
            busy = held.waits_for
            if (
                busy is not None
                and now_s < held.look_again_s
                and readiness(busy, held.uncached_tokens) is Readiness.BUSY
            ):
                continue
            outcome = self._pick(held, now_s, readiness)
            if isinstance(outcome, Pick):
                self._place(held, outcome, now_s)
                if not self._someone_is_ready(rooms, now_s):
                    return
            else:
                held.waits_for = outcome.account if outcome is not None else None
                held.look_again_s = now_s + LOOK_AGAIN_S

    def _start_phase(self, gate: PhaseGate, now_s: float) -> None:
        """Start a phase of one group with as many held requests as fit, longest first."""
        group = gate.group
        if not gate.may_start(now_s):
            return
        pools = self._ledger.pools
        ordered = [held for held in self._in_order(now_s) if group in pools.of(held.facts.model).groups]
        uncached = {held: self._least_uncached(held.facts, group.accounts) for held in ordered}
        phase_tokens = gate.phase_tokens([(uncached[held], now_s - held.arrived_s) for held in ordered])
        chosen = []
        left = phase_tokens * len(group.accounts)
        for held in ordered:
            if uncached[held] <= min(phase_tokens, left):
                chosen.append(held)
                left -= uncached[held]
        in_phase = self._readiness({group: phase_tokens}, now_s, inf)

        def readiness(account: RankAccount, uncached_tokens: int) -> Readiness:
            return in_phase(account, uncached_tokens) if account.group is group else Readiness.CLOSED

        for held in sorted(chosen, key=uncached.__getitem__, reverse=True):
            outcome = self._pick(held, now_s, readiness)
            if isinstance(outcome, Pick):
                self._place(held, outcome, now_s)

    def _decide_overdue(self, held: Held, now_s: float) -> None:
        outcome = self._pick(
            held,
            now_s,
            lambda account, _: Readiness.CLOSED if self._is_full(account, now_s) else Readiness.READY,
        )
        if isinstance(outcome, Pick):
            self._place(held, outcome, now_s)
        elif not self._picker.candidates(held.facts)[0]:
            self._settle(held, self._no_rank(held.facts))
        else:
            self._settle(held, Refused(503, DropReason.SATURATED, self._settings.max_hold_s))

    def _full(self) -> Refused:
        return Refused(429, DropReason.QUEUE_FULL, self._settings.max_hold_s)

    def _no_rank(self, facts: RequestFacts) -> Refused:
        """Trying again helps only if ranks for the request exist, but are out of rotation for now."""
        subset = facts.subset
        ranks = (account.rank for account in self._ledger.pools.of(facts.model).accounts)
        exists = any(subset is None or rank in subset for rank in ranks)
        return Refused(503, DropReason.NO_RANK, self._settings.max_hold_s if exists else None)

    def _pick(self, held: Held, now_s: float, readiness: Readinesses) -> Pick | Busy | None:
        explain = self._settings.explains_all or held.facts.wants_explanation
        return self._picker.pick(held.facts, now_s, readiness, explain=explain)

    def _place(self, held: Held, pick: Pick, now_s: float) -> None:
        reservation = self._ledger.reserve(pick.first, held.facts, now_s)
        self._settle(held, Placed(pick, reservation, now_s - held.arrived_s))

    def _settle(self, held: Held, decision: Placed | Refused) -> None:
        self._waiting.leave(held)
        held.decision = decision
        self._decided.append(held)

    def _in_order(self, now_s: float) -> list[Held]:
        """Held requests, those first that can still have their first token in time.

        Serving one that is late anyway before one that is not yet would only make both late.
        """
        rate = max(group.prefill_tokens_per_s for group in self._ledger.groups)

        def is_late(held: Held) -> bool:
            return now_s + held.uncached_tokens / rate > held.arrived_s + self._settings.targets.ttft_s

        return sorted(self._waiting, key=lambda held: (held.priority, is_late(held), held))

    # --- What fits -----------------------------------------------------------------------------------

    def _rooms(self, now_s: float) -> dict[GroupAccount, float]:
        """For the groups where prefill must not start at any time: how much a rank may have ahead of it."""
        return {group: gate.room_tokens(now_s) for group, gate in self._gates.items() if not gate.is_open}

    def _readiness(self, rooms: Mapping[GroupAccount, float], now_s: float, backlog_s: float) -> Readinesses:
        def readiness(account: RankAccount, uncached_tokens: int) -> Readiness:
            if self._is_full(account, now_s):
                return Readiness.CLOSED
            room = rooms.get(account.group)
            rate = account.group.prefill_tokens_per_s
            ahead = account.prefills.remaining_tokens(now_s, rate)
            if room is not None and ahead + uncached_tokens > room:
                return Readiness.CLOSED
            return Readiness.READY if ahead <= backlog_s * rate else Readiness.BUSY

        return readiness

    def _someone_is_ready(self, rooms: Mapping[GroupAccount, float], now_s: float) -> bool:
        """Whether any rank could take the shortest prompt."""
        readiness = self._readiness(rooms, now_s, self._settings.backlog_s)
        shortest = min((held.uncached_tokens for held in self._waiting), default=0)
        return any(readiness(account, shortest) is Readiness.READY for account in self._ledger.accounts)

    def _is_full(self, account: RankAccount, now_s: float) -> bool:
        """Whether the rank itself says, and lately, that requests queue for KV memory."""
        report, settings = account.report, self._settings
        return (
            report is not None
            and report.kv_cache_usage >= settings.full_kv_usage
            and report.waiting > 0
            and self._ledger.state(account, now_s) is RankState.FRESH
        )

    def _least_uncached(self, facts: RequestFacts, accounts: Sequence[RankAccount]) -> int:
        return facts.prompt_tokens - max(self._ledger.cached_tokens_each(accounts, facts))
