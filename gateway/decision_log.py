"""One log line for each request placed: where, why, and what the ranks would have cost.

Passes on all that it is told. Must never write what a tenant or a session is called.
"""

from __future__ import annotations

import logging

from ext_proc.decision import Placed, Refused
from ext_proc.explanation import in_one_line
from ext_proc.service import StreamObserver
from ext_proc.usage import Usage
from ext_proc.vocabulary import Rank

log = logging.getLogger(__name__)


class DecisionLog:
    """Stands before another observer of streams."""

    def __init__(self, observer: StreamObserver) -> None:
        self._observer = observer

    def on_placed(self, placed: Placed, duration_s: float) -> None:
        """Write where a request was placed."""
        facts = placed.reservation.facts
        log.info(
            "request %s: prompt_tokens=%d %s", facts.request_id, facts.prompt_tokens, in_one_line(placed)
        )
        self._observer.on_placed(placed, duration_s)

    def on_refused(self, refused: Refused) -> None:
        """Refusals are in Envoy's access log, with their reason."""
        self._observer.on_refused(refused)

    def on_response(self, rank: Rank, status: int | None, usage: Usage | None) -> None:
        """Pass on."""
        self._observer.on_response(rank, status, usage)
