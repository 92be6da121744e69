"""What one step of one rank computes, and what came of it.

Plain records between the scheduler and whoever runs or studies steps; must never decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ranks.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan in comparable form: two engines that scheduled the same have equal records."""

    prefills: tuple[tuple[str, int], ...]
    """Request id and tokens of every prefill chunk."""
    decodes: tuple[str, ...]
    preempted: tuple[str, ...]


@dataclass(slots=True)
class StepPlan:
    """One step's work."""

    prefills: list[tuple[SequenceState, int]]
    """Sequences that compute tokens before they can generate, with the tokens of this chunk."""
    decoding: list[SequenceState]
    """Sequences that generate one token each."""
    preempted: list[SequenceState]
    """Sequences that lost their blocks, and must compute them again."""
    starved: int
    """Decoding sequences that get no token, because the budget ran out before their turn."""
    admitted: list[SequenceState]
    """Sequences that left the waiting queue in this step."""
    prefill_tokens: int
    decode_sequences: int
    resident_kv_tokens: int
    """KV tokens of all running requests once the step is done."""

    def record(self) -> PlanRecord:
        """The plan in comparable form."""
        return PlanRecord(
            tuple((sequence.request.request_id, tokens) for sequence, tokens in self.prefills),
            tuple(sequence.request.request_id for sequence in self.decoding),
            tuple(sequence.request.request_id for sequence in self.preempted),
        )


@dataclass(slots=True)
class StepOutcome:
    """What a completed step produced: one token for every sequence in `prefilled` and `decoded`."""

    prefilled: list[SequenceState]
    """Sequences whose prefill ended: their first token, or the next after a preemption."""
    decoded: list[SequenceState]
    """The other sequences that generated a token."""
    finished: list[SequenceState]
    """Those of both for which it was the last."""
