"""The llm-d router's default profile (llm-d/llm-d-router pkg/epp, weights of config/loader/defaults.go).

    score = 2 × (longest queue - queue) / (longest - shortest)  +  2 × (1 - KV use)
          + 3 × matched prompt blocks / prompt blocks

The highest score wins, ties at random. Only reports count; a rank without one looks idle, and if all queues
are equal that part is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy

QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0


class LlmD(ScorePolicy):
    """Weighted sum of three scores."""

    name: ClassVar[str] = "llm_d"

    def costs(self, view: PickView) -> Sequence[float]:
        """The score of each rank, negated."""
        queues = [account.report.waiting if account.report else 0 for account in view.accounts]
        shortest, longest = min(queues), max(queues)
        costs = []
        for account, queue, cached in zip(view.accounts, queues, view.cached_tokens, strict=True):
            queue_score = 1.0 if longest == shortest else (longest - queue) / (longest - shortest)
            kv_score = 1.0 - (account.report.kv_cache_usage if account.report else 0.0)
            prefix_score = cached / max(1, view.facts.prompt_tokens)
            score = QUEUE_WEIGHT * queue_score + KV_WEIGHT * kv_score + PREFIX_WEIGHT * prefix_score
            costs.append(-score + 1e-9 * view.rng.random())
        return costs
