"""Phases: when a lock-step group may take on prefill, and how much on each rank.

Every rank waits for the slowest in each step, so one rank's prefill slows all others' decoding, and a
second rank's prefill at the same time costs nothing more. Hence, while decoding is behind its pace, prompts
wait: until it has caught up, when those that wait start together (a phase), or until they fit beside the
longest queue of prompts on any rank, where they cost nothing. Where holding prompts back would save
nobody's target, or the ranks have little to decode, none waits for that. Pure.
"""

from __future__ import annotations

from ext_proc.groups import GroupAccount
from ext_proc.token_lead import PACE_SHARE


class PhaseGate:
    """The phases of one lock-step group."""

    __slots__ = ("_from_sequences", "group")

    def __init__(self, group: GroupAccount, from_requests_per_rank: float) -> None:
        """Open while fewer than `from_requests_per_rank` decode, on the mean of the ranks."""
        self.group = group
        self._from_sequences = from_requests_per_rank * len(group.accounts)

    def is_open(self, now_s: float) -> bool:
        """Whether prefill may start at any time.

        So it is with little to decode; with a lead; if decoding alone cannot keep the pace; if steps with
        prefill meet the target, too; and if nobody knows the lead, because the ranks have not told of it
        lately.
        """
        group = self.group
        target_s = group.targets.tpot_s
        return (
            group.sequences < self._from_sequences
            or group.lead.tokens >= 0
            or group.decode_step_s >= PACE_SHARE * target_s
            or group.prefill_step_s <= target_s
            or now_s > group.observed_until_s
        )

    def room_tokens(self, now_s: float) -> float:
        """What any rank may have to compute, a new prompt included, and stall nobody longer: in tokens.

        Negative while nobody prefills: not even an empty prompt may start.
        """
        return self.group.longest_prefill_tokens(now_s) if self.group.is_prefilling else -1.0
