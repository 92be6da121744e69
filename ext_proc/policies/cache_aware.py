"""`cache_aware` of sglang-router and vllm-router (src/policies/cache_aware.rs, with their defaults).

While loads differ by more than 64 requests and by half, the rank with the fewest in flight. Otherwise the
rank that matches most of the prompt, if that is more than 30 %, else the one that remembers the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy

IMBALANCED_BY = 64
IMBALANCED_RATIO = 1.5
MATCH_THRESHOLD = 0.3


class CacheAware(ScorePolicy):
    """Cached prefix first, unless the load is out of balance."""

    name: ClassVar[str] = "cache_aware"

    def costs(self, view: PickView) -> Sequence[float]:
        """Requests in flight, or the negated match, or blocks remembered."""
        loads = [account.reservations for account in view.accounts]
        if max(loads) - min(loads) > IMBALANCED_BY and max(loads) > IMBALANCED_RATIO * min(loads):
            return loads
        if max(view.cached_tokens) > MATCH_THRESHOLD * view.facts.prompt_tokens:
            return [-cached for cached in view.cached_tokens]
        return [len(account.cache) for account in view.accounts]
