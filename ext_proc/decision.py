"""What is decided about a request: placed on a rank, refused, or held until one of the two.

The seam between the streams and whoever decides. Plain values; must never know messages or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ext_proc.reservation import Reservation
from ext_proc.vocabulary import Pick, RequestFacts


class DropReason(StrEnum):
    """Why the gateway itself answers a request; clients see it in `x-wavegate-drop-reason`."""

    NO_RANK = "no_rank"
    """No rank exists that the request may go to."""
    QUEUE_FULL = "queue_full"
    """As many requests wait as may."""
    SATURATED = "saturated"
    """It waited as long as it may, and every rank is still full."""
    MALFORMED_HEADER = "malformed_header"
    """A header that the gateway reads is not UTF-8."""
    MALFORMED_BODY = "malformed_body"
    NO_MODEL = "no_model"
    NO_PROMPT = "no_prompt"
    BODY_TOO_LARGE = "body_too_large"
    TOO_MANY_BODIES = "too_many_bodies"
    """The bodies under way would take more memory than they may."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The request goes to the first rank of the pick, where it is reserved."""

    pick: Pick
    reservation: Reservation
    held_s: float = 0.0
    """How long it waited in the gateway."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The gateway answers the request, with this HTTP status."""

    status: int
    reason: DropReason
    retry_after_s: float | None = None
    """When trying again may help; `None` where it will not, or nobody knows."""


class Held(Protocol):
    """A request that waits in the gateway. The decider fills in `decision`, once."""

    @property
    def decision(self) -> Placed | Refused | None:
        """`None` while it waits."""
        ...

    def withdraw(self, now_s: float) -> None:
        """Its client has gone before a decision was made: let it wait no longer."""
        ...


Decision = Placed | Refused | Held


class Decider(Protocol):
    """Whoever decides about requests."""

    def decide(self, facts: RequestFacts, now_s: float, /) -> Decision:
        """Decide about a request that has just arrived: reserve, refuse or hold it."""
        ...
