"""The requests held in the gateway: bounded in number and tokens, in a fair order.

Order: priority first (lower is more urgent, as in vLLM); within a priority, start-time fair queueing over
tenants by prompt tokens (Goyal, Vin, Cheng: Start-time Fair Queuing, SIGCOMM 1996), so that one tenant's
burst does not delay another's single request; within a tenant, arrival. Admission lets those that can no
longer be in time go after all others of their priority. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from ext_proc.accounts import RankAccount
from ext_proc.decision import Placed, Refused
from ext_proc.vocabulary import RequestFacts

MAX_TENANTS = 10_000
"""Tenants remembered; beyond that the memory of who had how much starts afresh."""


@dataclass(slots=True, order=True, unsafe_hash=True)
class Held:
    """One request waiting for its decision; sorts by the turn it gets."""

    priority: int
    fair_start: float
    """Virtual time at which the tenant's turn comes, in tokens."""
    sequence: int
    facts: RequestFacts = field(compare=False)
    arrived_s: float = field(compare=False)
    _room: WaitingRoom = field(compare=False, repr=False)
    uncached_tokens: int = field(compare=False, default=0)
    """Prompt tokens to compute on the rank that has most of the prompt, when it arrived."""
    waits_for: RankAccount | None = field(compare=False, default=None)
    """The busy rank that is best for it."""
    waits_for_more_than_tokens: float = field(compare=False, default=-1.0)
    """The largest room there was when it found no rank."""
    look_again_s: float = field(compare=False, default=0.0)
    """Until when the two are taken to be so."""
    decision: Placed | Refused | None = field(compare=False, default=None)
    """`None` while it waits."""

    def withdraw(self, now_s: float) -> None:
        """Its client has gone before a decision was made: let it wait no longer."""
        if self.decision is None:
            self._room.leave(self)


class WaitingRoom:
    """Held requests in the order in which they should get their turn."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._entries: list[Held] = []
        self._sequence = 0
        self._next_start: dict[int, dict[str, float]] = {}
        """Of each priority with requests that wait: where the next request of each tenant starts."""
        self.tokens = 0
        """Prompt tokens held."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._entries)

    def has_room(self, facts: RequestFacts) -> bool:
        """Whether one more request may wait. An empty room takes any."""
        return not self._entries or (
            len(self._entries) < self._max_requests and self.tokens + facts.prompt_tokens <= self._max_tokens
        )

    def enter(self, facts: RequestFacts, now_s: float) -> Held:
        """Hold a request."""
        if sum(map(len, self._next_start.values())) >= MAX_TENANTS:
            self._next_start.clear()
        next_start = self._next_start.setdefault(facts.priority, {})
        start = max(self._virtual_time(facts.priority), next_start.get(facts.tenant, 0.0))
        next_start[facts.tenant] = start + max(1, facts.prompt_tokens)
        self._sequence += 1
        held = Held(facts.priority, start, self._sequence, facts, now_s, self)
        insort(self._entries, held)
        self.tokens += facts.prompt_tokens
        return held

    def leave(self, held: Held) -> None:
        """The request has been placed, refused, or its client has gone."""
        del self._entries[bisect_left(self._entries, held)]
        self.tokens -= held.facts.prompt_tokens
        if self._first_of(held.priority) is None:
            self._next_start.pop(held.priority, None)

    def _virtual_time(self, priority: int) -> float:
        """The start of the request whose turn it is; one that goes out of turn changes nothing."""
        first = self._first_of(priority)
        return 0.0 if first is None else first.fair_start

    def _first_of(self, priority: int) -> Held | None:
        position = bisect_left(self._entries, priority, key=lambda held: held.priority)
        if position < len(self._entries) and self._entries[position].priority == priority:
            return self._entries[position]
        return None
