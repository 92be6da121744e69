"""The vocabulary of the tests: `rank(…)`, `request(…)`, `pool(…)`, `report(…)` in a few plain words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ext_proc.admission import Admission
from ext_proc.decision import Decision, Placed
from ext_proc.groups import GroupFacts
from ext_proc.ledger import Ledger
from ext_proc.picker import Picker
from ext_proc.policies import make_policy
from ext_proc.settings import AdmissionSettings, Affinity, LedgerSettings, Targets
from ext_proc.step_times import StepCosts, StepTimes
from ext_proc.vocabulary import CallKind, Rank, RankCounters, RankReport, RequestFacts
from ext_proc.waiting_room import Held

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


TIGHT = Targets(ttft_s=2.0, tpot_s=0.05)
"""Steps with prefill break this TPOT, steps without keep it."""


def placed(decision: Decision | None) -> Placed:
    """The decision, which places the request."""
    assert isinstance(decision, Placed)
    return decision


def held(decision: Decision) -> Held:
    """The decision, which holds the request."""
    assert isinstance(decision, Held)
    return decision


def behind(
    ranks: int = 4,
    *,
    per_rank: int = 3,
    targets: Targets = TIGHT,
    now_s: float = 1.0,
    lock_step: bool = True,
    idle: Sequence[Rank] = (),
    models: Mapping[str, Sequence[str]] | None = None,
) -> Ledger:
    """A group that decodes on every rank, behind `targets`: rank 0 has just read a prompt of 5 steps.

    `idle`: ranks of other groups. `models`: as in `pool`.
    """
    all_ranks = [*group("g0", ranks), *idle]
    ledger = pool(all_ranks, targets=targets, lock_step=lock_step, models=models)
    for index in range(ranks):
        for _ in range(per_rank):
            ledger.reserve(rank(index), request(), now_s - 0.7)
        got_tokens(ledger, index, now_s - 0.6, seen=per_rank)
    ledger.reserve(rank(0), request(prompt_tokens=5 * BUDGET_TOKENS), now_s - 0.6)
    for index in reversed(range(ranks)):
        got_tokens(ledger, index, now_s, seen=per_rank + (index == 0), tokens=5 * per_rank, each_after_s=0.12)
    return ledger


def got_tokens(
    ledger: Ledger, index: int, at_s: float, *, seen: int = 0, tokens: int = 0, each_after_s: float = 0.0
) -> None:
    """The rank reports more tokens, each so long after the one before, and `seen` first tokens in all."""
    account = ledger.accounts[index]
    had = counters() if account.report is None else account.report.counters or counters()
    said = counters(
        first_tokens=max(had.first_tokens, seen),
        inter_tokens=had.inter_token_count + tokens,
        inter_token_s=had.inter_token_sum_s + tokens * each_after_s,
    )
    ledger.record_report(rank(index), report(at_s, running=account.reservations, counters=said))
