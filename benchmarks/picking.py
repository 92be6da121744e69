"""What one decision costs in CPU time, and how that grows with the number of ranks.

Groups of eight busy ranks with fresh reports, all of which hold the system prompt and one in eight the whole
prompt. Measured are reading the request, the pick alone, and the whole decision: admission, pick, reservation
and its end. Only the machine it runs on makes these numbers comparable.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle

import msgspec

from ext_proc.admission import Admission
from ext_proc.decision import Placed
from ext_proc.facts import BLOCK_TOKENS, read_facts
from ext_proc.groups import GroupFacts
from ext_proc.ledger import Ledger
from ext_proc.picker import Picker
from ext_proc.policies import make_policy
from ext_proc.prompt_blocks import BYTES_PER_TOKEN
from ext_proc.reservation import Outcome
from ext_proc.settings import AdmissionSettings, LedgerSettings, Targets
from ext_proc.step_times import StepCosts, StepTimes
from ext_proc.vocabulary import Rank, RankCounters, RankReport, RequestFacts

RANKS = (8, 64, 256, 1024)
PROMPT_TOKENS = 4096
RANKS_PER_GROUP = 8
SYSTEM_PROMPT_TOKENS = 512
REQUESTS_PER_RANK = 6
"""Under way on every rank; one of them prefills."""
PROMPTS_REMEMBERED = 20
"""Other prompts of the same length in the index of every rank."""
KV_TOKENS = 2_000_000
MEASUREMENTS = 5
"""Of which the fastest counts: what else runs on the machine only ever slows down."""


class DecisionCost(msgspec.Struct, frozen=True):
    """CPU time of the parts of one decision, in microseconds."""

    ranks: int
    read_us: float
    """From the body to the facts."""
    pick_us: float
    """From the facts to an ordered list of ranks."""
    decision_us: float
    """From the facts to a reservation, and its release."""


def run(
    ranks: Sequence[int] = RANKS,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    policy: str = "lockstep",
    least_s: float = 0.1,
    on_done: Callable[[DecisionCost], None] = lambda cost: None,
) -> list[DecisionCost]:
    """Measure pools of so many `ranks`, each part for at least `least_s` a measurement."""
    costs = []
    for size in ranks:
        cost = _measure(size, prompt_tokens, policy, least_s)
        on_done(cost)
        costs.append(cost)
    return costs


def _measure(ranks: int, prompt_tokens: int, policy: str, least_s: float) -> DecisionCost:
    body = _body(prompt_tokens)
    facts = _read(body)
    ledger = _busy_ledger(ranks, facts)
    picker = Picker(ledger, make_policy(policy), pick_list_length=3, rng=random.Random(0))
    # Never holding: every decision then does the same work, a pick and a reservation.
    admission = Admission(ledger, picker, AdmissionSettings().never_holding())
    clock = _clock()
    # The ledger answers from memory when asked about the object of the last request again. Two in turn make
    # it look up the prompt each time.
    requests = cycle((facts, replace(facts)))

    def decide() -> None:
        now_s = next(clock)
        decision = admission.decide(next(requests), now_s)
        assert isinstance(decision, Placed)
        decision.reservation.release(Outcome.CANCELLED, now_s)

    return DecisionCost(
        ranks=ranks,
        read_us=_cpu_us(lambda: _read(body), least_s),
        pick_us=_cpu_us(lambda: picker.pick(next(requests), next(clock)), least_s),
        decision_us=_cpu_us(decide, least_s),
    )


def _body(prompt_tokens: int) -> bytes:
    rng = random.Random(1)
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=prompt_tokens * BYTES_PER_TOKEN))
    system, question = text[: SYSTEM_PROMPT_TOKENS * BYTES_PER_TOKEN], text[len(text) // 8 :]
    return msgspec.json.encode(
        {
            "model": "m",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": 256,
            "stream": True,
        }
    )


def _read(body: bytes) -> RequestFacts:
    return read_facts("/v1/chat/completions", body, "0b5d1f1e-6a4e-4f0e-9d5a-3f1d2c6b7a80")


def _busy_ledger(size: int, facts: RequestFacts) -> Ledger:
    rng = random.Random(2)
    ranks = [
        Rank(f"g{group}", index, f"10.{group // 250}.{group % 250}.1:{8000 + index}")
        for group, index in (divmod(n, RANKS_PER_GROUP) for n in range(size))
    ]
    groups = {
        name: GroupFacts(
            name=name,
            lock_step=True,
            times=StepTimes(StepCosts(), 2048, budget_is_known=True),
        )
        for name in {rank.group for rank in ranks}
    }
    ledger = Ledger(ranks, groups, LedgerSettings(block_tokens=BLOCK_TOKENS), Targets())
    others = [
        RequestFacts(facts.kind, str(n), model="m", prompt_tokens=500, max_tokens=256)
        for n in range(REQUESTS_PER_RANK)
    ]
    shared = facts.prompt_blocks[: SYSTEM_PROMPT_TOKENS // BLOCK_TOKENS]
    for n, (rank, account) in enumerate(zip(ranks, ledger.accounts, strict=True)):
        ledger.record_report(rank, _report(0.0, 0))
        for other in others:
            ledger.reserve(rank, other, 0.0)
        ledger.record_report(rank, _report(0.5, REQUESTS_PER_RANK))
        for _ in range(PROMPTS_REMEMBERED):
            account.cache.index.add([rng.getrandbits(60) for _ in facts.prompt_blocks])
        account.cache.index.add(shared if n % RANKS_PER_GROUP else facts.prompt_blocks)
    return ledger


def _report(at_s: float, requests: int) -> RankReport:
    counters = RankCounters(
        first_tokens=max(0, requests - 1),
        inter_token_sum_s=0.02 * requests,
        inter_token_count=requests,
        computed_prompt_tokens=500 * requests,
    )
    return RankReport(at_s, requests, 0, 0.5, counters=counters, kv_capacity_tokens=KV_TOKENS)


def _clock() -> Iterator[float]:
    """Time passes between decisions, yet not so much that reports go stale."""
    return (0.5 + n * 1e-6 for n in count())


def _cpu_us(work: Callable[[], object], least_s: float) -> float:
    """CPU time of one call: the least of several means."""
    work()
    calls = 1
    fastest_s = float("inf")
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(MEASUREMENTS):
            while True:
                elapsed_s = _elapsed_s(work, calls)
                if elapsed_s >= least_s:
                    break
                calls = max(calls + 1, min(calls * 10, round(1.2 * calls * least_s / max(elapsed_s, 1e-6))))
            fastest_s = min(fastest_s, elapsed_s / calls)
    finally:
        if was_collecting:
            gc.enable()
    return round(fastest_s * 1e6, 1)


def _elapsed_s(work: Callable[[], object], calls: int) -> float:
    started_s = time.thread_time()
    for _ in range(calls):
        work()
    return time.thread_time() - started_s
