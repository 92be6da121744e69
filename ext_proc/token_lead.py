"""How far a lock-step group's decoding is ahead of the pace that its TPOT target asks for, in tokens.

Every step gives each decoding request a token; the target wants one every `target_s`. Short steps build a
lead, steps long with prefill use it up. While the lead lasts, prefill harms nobody's target. Pure.
"""

from __future__ import annotations

PACE_SHARE = 0.95
"""The pace to keep, as a share of the target: some requests fare worse than the mean."""
LONGEST_LEAD_TOKENS = 150.0
"""Bound of the lead: what was saved longer ago belongs to requests that have mostly ended."""
LONGEST_LAG_TOKENS = 60.0
"""Bound of how far decoding is held to be behind, for the same reason."""
FIRST_LEAD_TOKENS = 60.0
"""The lead of those who begin to decode where nobody did."""
COMFORTABLE_LEAD_TOKENS = 30.0
"""With this much lead, prefill need not be held back."""


class TokenLead:
    """The lead of one group."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = FIRST_LEAD_TOKENS

    @property
    def is_comfortable(self) -> bool:
        """Whether prefill may start at any time."""
        return self.tokens >= COMFORTABLE_LEAD_TOKENS

    def pass_time(self, elapsed_s: float, step_s: float, target_s: float) -> None:
        """For `elapsed_s`, steps took `step_s` each."""
        lead = self.tokens + elapsed_s / step_s - elapsed_s / (PACE_SHARE * target_s)
        self.tokens = max(-LONGEST_LAG_TOKENS, min(LONGEST_LEAD_TOKENS, lead))

    def reset(self) -> None:
        """Nobody decodes: whoever starts next owes nothing."""
        self.tokens = FIRST_LEAD_TOKENS
