"""How long the steps of one group take, learned from what its ranks report. Pure.

    step = fixed + prefill tokens × per_prefill_token + per_decode_sequence × decoding sequences
           + per_kv_token × resident KV tokens          (of the rank for which that is longest)

A step with prefill computes up to `budget_tokens` of prompts. So while any rank prefills, steps last
`prefill_step_s`, and while none does, `decode_step_s`: the two numbers that admission turns on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ext_proc.online_fit import OnlineFit

UNKNOWN_BUDGET_TOKENS = 2_048
"""Where to start when nobody says what the engine's budget is."""
SHORTEST_STEP_S = 1e-4
"""No engine steps faster; keeps a rate per step finite whatever is learned."""
SMOOTHING = 0.05
"""Weight of the newest observation in a running mean."""
FULL_CHUNK_QUANTILE = 0.75
"""Where among the steps seen with prefill a full chunk is expected."""
FEWEST_OBSERVATIONS = 20
"""What was learned from fewer is mostly what was assumed at first."""
FEWEST_FULL_STEPS = 4
"""A prefill of fewer full chunks says too little about their length."""
OUTLIER_FACTOR = 2.0
"""An observation this many times above or below the running mean is pulled in to that."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The parameters of the linear model, in seconds."""

    fixed_s: float = 0.020
    per_prefill_token_s: float = 80e-6
    per_decode_sequence_s: float = 100e-6
    per_kv_token_s: float = 2e-8

    def decode_step_s(self, decoding_sequences: float, resident_kv_tokens: float) -> float:
        """A step in which no rank prefills."""
        step_s = (
            self.fixed_s
            + self.per_decode_sequence_s * decoding_sequences
            + self.per_kv_token_s * resident_kv_tokens
        )
        return max(step_s, SHORTEST_STEP_S)


class StepTimes:
    """The learned model of one group."""

    __slots__ = (
        "_budget_is_told",
        "_budget_observations",
        "_chunk_s",
        "_decode",
        "budget_tokens",
        "costs",
        "observations",
    )

    def __init__(self, prior: StepCosts, budget_tokens: int, *, budget_is_known: bool) -> None:
        """Start from `prior` until observations say otherwise.

        Args:
            budget_tokens: the engine's `max_num_batched_tokens`, or a guess.
            budget_is_known: whether it came from the configuration, so that it is not to be learned.
        """
        self._decode = OnlineFit((prior.fixed_s, prior.per_decode_sequence_s, prior.per_kv_token_s))
        self._chunk_s = prior.per_prefill_token_s * budget_tokens
        self._budget_is_told = budget_is_known
        self._budget_observations = 0
        self.budget_tokens = float(budget_tokens)
        self.observations = 0
        """Steps and prefills learned from so far."""
        self.costs = self._believed()
        """The parameters as they are believed now."""

    @property
    def budget_is_known(self) -> bool:
        """Whether `budget_tokens` was told or learned, and is not just where learning starts."""
        return self._budget_is_told or self._budget_observations >= FEWEST_OBSERVATIONS

    def decode_step_s(self, decoding_sequences: float, resident_kv_tokens: float) -> float:
        """A step in which no rank prefills."""
        return self.costs.decode_step_s(decoding_sequences, resident_kv_tokens)

    def prefill_step_s(self, decoding_sequences: float, resident_kv_tokens: float) -> float:
        """A step in which some rank computes a full chunk of prompts."""
        return self.decode_step_s(decoding_sequences, resident_kv_tokens) + self._chunk_s

    # --- Learning ------------------------------------------------------------------------------------

    def observe_decode_step(
        self, step_s: float, decoding_sequences: float, resident_kv_tokens: float
    ) -> None:
        """A step without prefill took `step_s`."""
        self.observations += 1
        self._decode.observe((1.0, decoding_sequences, resident_kv_tokens), step_s)
        self.costs = self._believed()

    def observe_prefill_step(
        self, step_s: float, decoding_sequences: float, resident_kv_tokens: float
    ) -> None:
        """A step with a full chunk of prefill on some rank took `step_s`."""
        if self._budget_is_told:
            return
        self.observations += 1
        chunk_s = step_s - self.decode_step_s(decoding_sequences, resident_kv_tokens)
        # Mistaken for full chunks, now and then, are smaller ones and none at all; a quantile, unlike a mean,
        # does not mind how much smaller.
        nudge = FULL_CHUNK_QUANTILE if chunk_s > self._chunk_s else FULL_CHUNK_QUANTILE - 1.0
        self._chunk_s *= 1.0 + SMOOTHING * nudge
        self.costs = self._believed()

    def observe_prefill(
        self, tokens: int, duration_s: float, decoding_sequences: float, resident_kv_tokens: float
    ) -> None:
        """A prefill of `tokens` took `duration_s` from its first step to its first token."""
        if tokens < FEWEST_FULL_STEPS * self.budget_tokens or duration_s <= 0:
            return  # too short against the delay of the reports
        self.observations += 1
        if self._budget_is_told:
            step_s = duration_s * self.budget_tokens / tokens
            chunk_s = step_s - self.decode_step_s(decoding_sequences, resident_kv_tokens)
            self._chunk_s = _pull(self._chunk_s, chunk_s)
        else:
            self._budget_observations += 1
            step_s = self.prefill_step_s(decoding_sequences, resident_kv_tokens)
            self.budget_tokens = _pull(self.budget_tokens, tokens * step_s / duration_s)
        self.costs = self._believed()

    def _believed(self) -> StepCosts:
        fixed_s, per_decode_sequence_s, per_kv_token_s = self._decode.weights
        return StepCosts(fixed_s, self._chunk_s / self.budget_tokens, per_decode_sequence_s, per_kv_token_s)


def _pull(mean: float, observed: float) -> float:
    bounded = max(mean / OUTLIER_FACTOR, min(mean * OUTLIER_FACTOR, observed))
    return mean + SMOOTHING * (bounded - mean)
