"""Which token budget (`max_num_batched_tokens`) suits the targets, by the model of step times. Pure.

The budget bounds how long a step can get, so it decides the time between tokens before any router does:

    longest step = step that only decodes + per_prefill_token × budget

A larger budget computes prompts faster, since fixed costs are shared by more tokens. So the best budget is
the largest whose longest step keeps the TPOT target.
"""

from __future__ import annotations

from dataclasses import dataclass

from ext_proc.settings import Targets
from ext_proc.step_times import StepCosts

SAFE_SHARE = 0.95
"""The longest step should take at most this share of the TPOT target."""
GRANULE_TOKENS = 64
"""Budgets are rounded down to a multiple of that."""
LARGEST_BUDGET_TOKENS = 65_536
"""Beyond that a larger budget gains next to nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the busiest rank of a group has to do beside prefill."""

    decoding_sequences: float
    kv_tokens: float
    """Resident KV tokens."""


@dataclass(frozen=True, slots=True)
class BudgetEffect:
    """What a budget leads to."""

    budget_tokens: int
    longest_step_s: float
    """Time between tokens while somebody prefills: the TPOT of a request that decodes all the while."""
    prefill_tokens_per_s: float
    """Prompt tokens that a rank computes while it prefills."""
    longest_prompt_tokens: int
    """Prompt whose first token just meets the TTFT target on a rank with nothing else ahead of it."""


def effect(costs: StepCosts, load: Load, targets: Targets, budget_tokens: int) -> BudgetEffect:
    """What this budget leads to at this load."""
    step_s = (
        costs.decode_step_s(load.decoding_sequences, load.kv_tokens)
        + costs.per_prefill_token_s * budget_tokens
    )
    tokens_per_s = budget_tokens / step_s
    return BudgetEffect(budget_tokens, step_s, tokens_per_s, int(targets.ttft_s * tokens_per_s))


def best_budget_tokens(costs: StepCosts, load: Load, targets: Targets) -> int | None:
    """The largest budget whose longest step keeps the TPOT target; `None`: decoding alone breaks it."""
    left_s = SAFE_SHARE * targets.tpot_s - costs.decode_step_s(load.decoding_sequences, load.kv_tokens)
    granules = int(left_s / costs.per_prefill_token_s) // GRANULE_TOKENS if left_s > 0 else 0
    return min(granules * GRANULE_TOKENS, LARGEST_BUDGET_TOKENS) or None
