"""A reservation: the record of one request placed on one rank, from the pick until the response ends.

It is taken by `Ledger.reserve` and ends by `release`, exactly once. Pure; must never count anything itself:
the ledger keeps the books.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from ext_proc.accounts import RankAccount
from ext_proc.vocabulary import Rank, RequestFacts


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


class Books(Protocol):
    """Where reservations are counted."""

    def close(self, reservation: Reservation, now_s: float) -> None:
        """Book the end of a reservation."""
        ...

    def move(self, reservation: Reservation, endpoint: str, now_s: float) -> None:
        """Count a reservation on another rank."""
        ...


class Reservation:
    """One request placed on one rank, from the pick until the response ends."""

    __slots__ = (
        "_books",
        "account",
        "facts",
        "first_token_step",
        "is_guess",
        "outcome",
        "placed_at_s",
        "uncached_tokens",
    )

    def __init__(self, books: Books, account: RankAccount, facts: RequestFacts, now_s: float) -> None:
        self._books = books
        self.account = account
        self.facts = facts
        self.uncached_tokens = facts.prompt_tokens
        """Prompt tokens the rank probably had to compute."""
        self.placed_at_s = now_s
        """When it was placed on this rank."""
        self.first_token_step: float | None = None
        """The group's step count when the request began to decode; `None` before that."""
        self.is_guess = False
        """Whether that was assumed, not reported."""
        self.outcome: Outcome | None = None
        """`None` while the reservation is open."""

    @property
    def rank(self) -> Rank:
        """Where the request was placed."""
        return self.account.rank

    def release(self, outcome: Outcome, now_s: float) -> None:
        """End the reservation; calls after the first change nothing."""
        if self.outcome is None:
            self.outcome = outcome
            self._books.close(self, now_s)

    def move(self, endpoint: str, now_s: float) -> None:
        """The rank at `endpoint` serves the request: it counts there from now on.

        An endpoint that is no rank of the ledger changes nothing.
        """
        if self.outcome is None and endpoint != self.rank.endpoint:
            self._books.move(self, endpoint, now_s)

    def leave_unobserved(self, now_s: float) -> None:
        """The stream has ended, the response perhaps not: the rank's reports must show the end."""
        if self.outcome is None:
            self.account.unobserved.append((now_s, self))
