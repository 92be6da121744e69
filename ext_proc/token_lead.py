"""How far a lock-step group's decoding is ahead of the pace that its TPOT target asks for, in tokens.

Every step gives each decoding request a token; the pace is a little faster than one per TPOT target. Short
steps build a lead, steps long with prefill use it up. While there is a lead, prefill does not take the mean
request past its target. It is measured: the ranks report how many tokens their requests got, and how long
those waited for them. Pure.
"""

from __future__ import annotations

PACE_SHARE = 0.9
"""The pace to keep, as a share of the target: some requests fare worse than the mean."""
LONGEST_LEAD_TOKENS = 20.0
"""Bound of the lead: what was saved before is of no use to requests that have begun since."""
LONGEST_LAG_TOKENS = 100.0
"""Bound of the lag: whoever was late so long ago has mostly ended, and is not helped any more."""


class TokenLead:
    """The lead of one group, the mean over its decoding requests."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0.0

    def record(self, tokens: int, waited_s: float, *, sequences: int, target_s: float) -> None:
        """Some of the group's `sequences` got `tokens`, for which they waited `waited_s` in all."""
        lead = self.tokens + (tokens - waited_s / (PACE_SHARE * target_s)) / sequences
        self.tokens = max(-LONGEST_LAG_TOKENS, min(LONGEST_LEAD_TOKENS, lead))

    def reset(self) -> None:
        """Nobody decodes: whoever starts next owes nothing."""
        self.tokens = 0.0
