"""The vocabulary of the tests: `rank(…)`, `request(…)`, `pool(…)`, `report(…)` in a few plain words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ext_proc.admission import Admission
from ext_proc.groups import GroupFacts
from ext_proc.ledger import Ledger
from ext_proc.picker import Picker
from ext_proc.policies import make_policy
from ext_proc.settings import AdmissionSettings, Affinity, LedgerSettings, Targets
from ext_proc.step_times import StepCosts, StepTimes
from ext_proc.vocabulary import CallKind, Rank, RankCounters, RankReport, RequestFacts

STALE_AFTER_S = 2.0
DOWN_AFTER_FAILURES = 3
BLOCK_TOKENS = 64
BUDGET_TOKENS = 1000
COSTS = StepCosts(
    fixed_s=0.020, per_prefill_token_s=0.0001, per_decode_sequence_s=0.0001, per_kv_token_s=1e-9
)
"""With the budget: steps of about 20 ms, or 120 ms with prefill, so about 8,300 prompt tokens a second."""


def rank(index: int = 0, *, group: str = "g0") -> Rank:
    """A rank at an address of its own."""
    return Rank(group, index, f"10.0.{sum(group.encode()) % 250}.1:{8000 + index}")


def group(name: str, size: int) -> list[Rank]:
    """The ranks of one group."""
    return [rank(index, group=name) for index in range(size)]


def request(
    *,
    request_id: str = "r",
    model: str | None = "m",
    prompt_tokens: int = 100,
    max_tokens: int | None = 16,
    blocks: Sequence[int] = (),
    priority: int = 0,
    tenant: str = "",
) -> RequestFacts:
    """Facts of a chat request."""
    return RequestFacts(
        kind=CallKind.CHAT,
        request_id=request_id,
        model=model,
        prompt_chars=prompt_tokens * 4,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        prompt_blocks=tuple(blocks),
        priority=priority,
        tenant=tenant,
    )


def report(
    at_s: float = 0.0,
    *,
    running: int = 0,
    waiting: int = 0,
    kv: float = 0.0,
    counters: RankCounters | None = None,
) -> RankReport:
    """What a rank says at `at_s`."""
    return RankReport(taken_at_s=at_s, running=running, waiting=waiting, kv_cache_usage=kv, counters=counters)


def counters(
    *,
    first_tokens: int = 0,
    computed_prompt_tokens: int = 0,
    inter_token_s: float = 0.0,
    inter_tokens: int = 0,
) -> RankCounters:
    """What a rank has counted so far."""
    return RankCounters(first_tokens, inter_token_s, inter_tokens, computed_prompt_tokens)


def pool(
    ranks: Sequence[Rank],
    *,
    reported_at_s: float | None = 0.0,
    lock_step: bool = True,
    targets: Targets | None = None,
    models: Mapping[str, Sequence[str]] | None = None,
    by_tokens: bool = False,
) -> Ledger:
    """A ledger over `ranks`, each idle by a report of `reported_at_s` (None: never reported).

    `models`: names by which clients ask for what each group serves. `by_tokens`: prompts are known as tokens.
    """
    facts = {
        name: GroupFacts(
            name=name,
            lock_step=lock_step,
            times=StepTimes(COSTS, BUDGET_TOKENS, budget_is_known=True),
            block_tokens=BLOCK_TOKENS,
            by_tokens=by_tokens,
            models=tuple((models or {}).get(name, ())),
        )
        for name in {one.group for one in ranks}
    }
    settings = LedgerSettings(
        stale_after_s=STALE_AFTER_S, down_after_failures=DOWN_AFTER_FAILURES, block_tokens=BLOCK_TOKENS
    )
    ledger = Ledger(ranks, facts, settings, targets or Targets())
    if reported_at_s is not None:
        for one in ranks:
            ledger.record_report(one, report(reported_at_s, counters=counters()))
    return ledger


def picker(
    ledger: Ledger,
    policy: str = "lockstep",
    *,
    pick_list_length: int = 3,
    affinity: Affinity | None = None,
) -> Picker:
    """A policy over `ledger`."""
    return Picker(
        ledger,
        make_policy(policy),
        pick_list_length=pick_list_length,
        rng=random.Random(0),
        affinity=affinity,
    )


def admission(ledger: Ledger, settings: AdmissionSettings | None = None) -> Admission:
    """The default policy over `ledger`, with admission."""
    return Admission(ledger, picker(ledger), settings or AdmissionSettings())


def balancer(ledger: Ledger, *, pick_list_length: int = 3) -> Admission:
    """The default policy over `ledger`; every request is placed when it arrives."""
    return Admission(
        ledger, picker(ledger, pick_list_length=pick_list_length), AdmissionSettings().never_holding()
    )
