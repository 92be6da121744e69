"""What vLLM's own internal load balancer picks (vLLM 0.32 vllm/v1/engine/core_client.py).

    score = max(in flight, waiting + running) + waiting × 6 × max(0, KV use - 0.5)

The counts are those last published, and each pick since then counts as one more waiting. The scan starts one
engine further with each pick, and the first of equals wins. There is one client here: this gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy

TIE = 1e-6
"""Far below the smallest difference of two scores."""


class VllmInternal(ScorePolicy):
    """The formula of vLLM 0.32."""

    name: ClassVar[str] = "vllm_internal"

    def costs(self, view: PickView) -> Sequence[float]:
        """The score of each rank."""
        ranks = len(view.accounts)
        turn = sum(account.picks for account in view.accounts)
        costs = []
        for index, account in enumerate(view.accounts):
            report = account.report
            waiting = account.picks_since_report + (report.waiting if report else 0)
            running = report.running if report else 0
            kv_cache_usage = report.kv_cache_usage if report else 0.0
            score = max(float(account.reservations), float(waiting + running))
            score += waiting * 6.0 * max(0.0, kv_cache_usage - 0.5)
            costs.append(score + TIE * ((index - turn) % ranks))
        return costs
