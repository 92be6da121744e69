"""Dynamo's KV router cost (ai-dynamo/dynamo docs/components/router/router-concepts.md), temperature 0.

    cost = max(active prefill + new prompt - cached, 0) + decode blocks,   all in blocks of 16 tokens

Active prefill is what was sent and has had no first token; decode blocks are those of all requests in flight.
Ties at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy

BLOCK_TOKENS = 16


class DynamoCost(ScorePolicy):
    """Prefill and decode blocks, added."""

    name: ClassVar[str] = "dynamo_cost"

    def costs(self, view: PickView) -> Sequence[float]:
        """Blocks per rank."""
        costs = []
        for account, cached in zip(view.accounts, view.cached_tokens, strict=True):
            prefill_tokens = account.prefills.tokens + view.facts.prompt_tokens - cached
            decode_tokens = account.prompt_tokens_open
            costs.append((prefill_tokens + decode_tokens) / BLOCK_TOKENS + 1e-6 * view.rng.random())
        return costs
