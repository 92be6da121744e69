"""Phases: when a lock-step group may take on prefill, and how much on each rank.

Every rank waits for the slowest in each step, so one rank's prefill slows all others' decoding, and a second
rank's prefill at the same time costs nothing more. Hence, while the group's decoding has no lead on its TPOT
target:
- prompts wait until they can start together (a phase), and until decoding has caught up since the last;
- while a phase is under way, a prompt that ends before the longest one under way may join.
With a lead, or where steps with prefill are within the target anyway, nothing waits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from ext_proc.groups import GroupAccount
from ext_proc.token_lead import PACE_SHARE

WELL_PACKED_SHARE = 0.5
"""Prompts that fill this share of ranks × the longest of them are worth a phase at once."""
PATIENCE_SHARE_OF_TTFT = 0.05
"""A prompt that has waited this share of the TTFT target is worth a phase however badly it packs."""
URGENT_SHARE_OF_TTFT = 0.25
"""After this share of the TTFT target no phase leaves out a prompt that can still be in time."""
LATE_URGENT_SHARE_OF_TTFT = 1.0
"""After this share no phase leaves out a prompt that cannot."""

DECODE_SHARE_MARGIN = 1.2
"""Decoding gets this much more time between phases than the mean TPOT needs: requests are not all mean."""


class PhaseGate:
    """The phases of one lock-step group."""

    __slots__ = ("group",)

    def __init__(self, group: GroupAccount) -> None:
        self.group = group

    @property
    def is_open(self) -> bool:
        """Whether prefill may start at any time: it harms nobody's target, or no target can be met."""
        group = self.group
        pace_s = PACE_SHARE * group.targets.tpot_s
        return (
            group.decoding_sequences == 0
            or group.lead.is_comfortable
            or group.decode_step_s >= pace_s
            or group.prefill_step_s <= pace_s
        )

    def room_tokens(self, now_s: float) -> float:
        """How much prefill any rank may have ahead of it, in tokens, without stalling the group for longer.

        Negative while nobody prefills: not even an empty prompt may start.
        """
        return self.group.longest_prefill_tokens(now_s) if self.group.is_prefilling else -1.0

    def may_start(self, now_s: float) -> bool:
        """Whether a phase may begin now, if there is something worth one."""
        group = self.group
        if self.is_open or group.is_prefilling:
            return False
        return now_s >= group.phase_ended_s + self._decode_share() * group.phase_length_s

    def _decode_share(self) -> float:
        """How long decoding should go undisturbed after a phase, as a multiple of the phase's length.

        In a phase of n steps of length p and a stretch of m steps of length d, requests get n + m tokens in
        n·p + m·d seconds. That is the target's pace when m·d = (n·p) × (p - target) / (target - d) × d / p.
        """
        group = self.group
        target_s, decode_s, prefill_s = group.targets.tpot_s, group.decode_step_s, group.prefill_step_s
        return DECODE_SHARE_MARGIN * (prefill_s - target_s) / (target_s - decode_s) * decode_s / prefill_s

    def phase_tokens(self, waiting: Sequence[tuple[float, float]]) -> float:
        """How long a phase to start with what is held, in tokens per rank; 0 if it is not worth one yet.

        Args:
            waiting: uncached tokens, and seconds waited, of each prompt held for this group.
        """
        ttft_s, rate = self.group.targets.ttft_s, self.group.prefill_tokens_per_s
        must_go = max(
            (
                tokens
                for tokens, waited_s in waiting
                if waited_s
                >= ttft_s * (URGENT_SHARE_OF_TTFT if tokens <= rate * ttft_s else LATE_URGENT_SHARE_OF_TTFT)
            ),
            default=0.0,
        )
        ranks = len(self.group.accounts)
        total = sum(tokens for tokens, _ in waiting)
        for longest in sorted((tokens for tokens, _ in waiting), reverse=True):
            if longest <= must_go or total >= WELL_PACKED_SHARE * ranks * longest:
                return longest
            total -= longest
        patience_s = PATIENCE_SHARE_OF_TTFT * ttft_s
        return max((tokens for tokens, waited_s in waiting if waited_s >= patience_s), default=0.0)
