"""Least request: the rank with the fewest own requests in flight, ties at random.

As AIBrix's `least-request` (aibrix pkg/plugins/gateway/algorithms/least_request.go) and, over all ranks
instead of two drawn ones, Envoy's LEAST_REQUEST.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy


class LeastRequest(ScorePolicy):
    """Fewest open reservations."""

    name: ClassVar[str] = "least_request"

    def costs(self, view: PickView) -> Sequence[float]:
        """Requests in flight; the fraction draws lots among equals."""
        return [account.reservations + view.rng.random() / 2 for account in view.accounts]
