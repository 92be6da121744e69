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


LOCKSTEP_MOE = StepTimeModel()
"""The documented default of this project's model: a mid-size MoE in lock step. Not a measurement.

20 ms + 0.08 ms per prefill token + 0.1 ms per decoding sequence + 20 ns per KV token. Round numbers of
the right order, chosen so that a 2,048-token chunk (184 ms) is clearly longer than a decode step.
"""

DENSE_8B_H100 = StepTimeModel(
    fixed_s=0.0065,
    per_prefill_token_s=32e-6,
    per_decode_sequence_s=15e-6,
    per_kv_token_s=5.2e-8,
    dummy_s=0.0065,
)
"""A small dense model: Llama-3.1-8B in BF16 on one H100 SXM. An estimate from published figures.

From the model's configuration and the GPU's data sheet (3.35 TB/s, 989 TFLOPS dense BF16):
- fixed: 16.1 GB of weights are read every step, at 75 % of the bandwidth: 6.4 ms.
- prefill token: 2 × 8.03e9 FLOP at 50 % of the peak: 32 us.
- KV token: 32 layers × 8 KV heads × 128 × 2 (K, V) × 2 bytes = 131,072 bytes, at 75 %: 52 ns.
- decoding sequence: its matrix products hide behind the weights; 15 us of sampling and bookkeeping is
  an assumption.
"""

MOE_671B_8_GPUS = StepTimeModel(
    fixed_s=0.025,
    per_prefill_token_s=250e-6,
    per_decode_sequence_s=140e-6,
    per_kv_token_s=2.3e-8,
    dummy_s=0.025,
)
"""A large MoE on 8 GPUs: DeepSeek-V3/R1 in FP8, attention data-parallel, one rank per GPU. An estimate.

From DeepSeek's own production figures ("DeepSeek-V3/R1 Inference System Overview", March 2025; per node
of 8 H800, on a wider deployment than 8 GPUs): 73.7k prompt tokens/s of which 56.3 % are cached, 14.8k
generated tokens/s at 20 to 22 tokens/s each with 4,989 KV tokens on average.
- prefill token: 73.7k × 43.7 % / 8 = 4,026 computed tokens/s per GPU: 250 us.
- decoding: 1,850 tokens/s per GPU at 21 tokens/s are 88 sequences and steps of 47.6 ms, made up of
  - KV token: 61 layers × 576 × 2 bytes = 70,272 bytes at 3 TB/s: 23 ns, together 10 ms;
  - fixed: an eighth of 671 GB of weights, read at 70 % of the 4.8 TB/s of an H200 (which 8 GPUs that
    hold the model must be): 25 ms;
  - decoding sequence: the rest, 12 ms over 88: 0.14 ms.
"""

DEFAULT_PRESET = "lockstep-moe"

PRESETS: dict[str, StepTimeModel] = {
    DEFAULT_PRESET: LOCKSTEP_MOE,
    "dense-8b-h100": DENSE_8B_H100,
    "moe-671b-8-gpus": MOE_671B_8_GPUS,
}
