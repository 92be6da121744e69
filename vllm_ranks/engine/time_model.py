"""How long a step takes: a linear model of a rank's work, with presets and where they come from.

Must never decide what runs in a step, and never sleep: it turns a load into seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


class StepLoad(Protocol):
    """What a step computes; `StepPlan` is one."""

    prefill_tokens: int
    decode_sequences: int
    resident_kv_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds per step of one rank, before it waits for the slowest rank of its group.

    step = (fixed + per_prefill_token × prefill tokens + per_decode_sequence × decoding sequences
            + per_kv_token × KV tokens of the running requests) × slowdown × jitter
    """

    fixed_s: float = 0.020
    per_prefill_token_s: float = 80e-6
    per_decode_sequence_s: float = 100e-6
    per_kv_token_s: float = 2e-8
    dummy_s: float = 0.020
    """A dummy batch: what a rank without work runs because its group steps together."""
    jitter_ratio: float = 0.0
    """Each step is multiplied by a factor drawn evenly from 1 ± this ratio."""
    slowdown: float = 1.0
    """Above 1 the rank is slower than its kind: a degraded machine."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_prefill_token_s", "per_decode_sequence_s", "per_kv_token_s", "dummy_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.jitter_ratio < 1:
            raise ValueError(f"jitter_ratio must lie in [0, 1), got {self.jitter_ratio}")
        if self.slowdown <= 0:
            raise ValueError(f"slowdown must be above 0, got {self.slowdown}")

    def step_s(self, load: StepLoad, rng: random.Random) -> float:
        """Duration of a step that computes `load`, in seconds."""
        cost_s = (
            self.fixed_s
            + self.per_prefill_token_s * load.prefill_tokens
            + self.per_decode_sequence_s * load.decode_sequences
            + self.per_kv_token_s * load.resident_kv_tokens
        ) * self.slowdown
        return cost_s if self.jitter_ratio == 0 else cost_s * self._jitter(rng)

    def dummy_step_s(self, rng: random.Random) -> float:
        """Duration of a dummy batch, in seconds."""
        cost_s = self.dummy_s * self.slowdown
        return cost_s if self.jitter_ratio == 0 else cost_s * self._jitter(rng)

    def _jitter(self, rng: random.Random) -> float:
        return 1 + self.jitter_ratio * (2 * rng.random() - 1)


DEFAULT_PRESET = "lockstep-moe"

PRESETS: dict[str, StepTimeModel] = {
    DEFAULT_PRESET: StepTimeModel(),
}
