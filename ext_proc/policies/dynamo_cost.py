"""Dynamo's KV router cost (ai-dynamo/dynamo docs/components/router/router-concepts.md), with its defaults.

    cost = max(active prefill + new prompt - cached, 0) + decode blocks,   all in blocks of 16 tokens

Active prefill is what was sent and has had no first token, less what was cached of it; decode blocks are the
prompts of all requests in flight. The last token of a prompt is always computed here, so that nothing is ever
below 0. Ties at random.

Left out of decode blocks: those of the request to be placed, which differ between ranks only by what it
shares with requests in flight there; and those of generated tokens, which Dynamo counts if asked to
(`--router-track-output-blocks`).
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
