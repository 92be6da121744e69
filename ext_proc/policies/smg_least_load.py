"""SMG's `least_load` (smg-project/smg model_gateway/src/policies/least_load.rs), in seconds.

    (queued tokens + tokens sent since the poll) / throughput + 0.15 × k / (1 - k),   k = KV use up to 0.999

vLLM reports neither queued tokens nor a throughput, for which SMG assumes 1,024 tokens per waiting request
and 2,000 tokens/s; over HTTP every request counts as 1,024. A rank without a report, while others have one,
counts its requests in flight; without any report, that number alone decides. Ties at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy

REQUEST_TOKENS = 1024
TOKENS_PER_S = 2000.0
KV_WEIGHT = 0.15
MAX_KV = 0.999


class SmgLeastLoad(ScorePolicy):
    """Seconds of queue and a KV barrier."""

    name: ClassVar[str] = "smg_least_load"

    def costs(self, view: PickView) -> Sequence[float]:
        """Seconds per rank, or requests in flight while no rank has reported."""
        lots = [1e-9 * view.rng.random() for _ in view.accounts]
        if all(account.report is None for account in view.accounts):
            return [account.reservations + lot for account, lot in zip(view.accounts, lots, strict=True)]
        costs = []
        for account, lot in zip(view.accounts, lots, strict=True):
            if account.report is None:
                costs.append(account.reservations * REQUEST_TOKENS / TOKENS_PER_S + lot)
                continue
            k = min(account.report.kv_cache_usage, MAX_KV)
            queued = (account.report.waiting + account.picks_since_report) * REQUEST_TOKENS
            costs.append(queued / TOKENS_PER_S + KV_WEIGHT * k / (1 - k) + lot)
        return costs
