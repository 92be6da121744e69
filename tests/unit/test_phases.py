"""When a lock-step group may prefill. Steps: 20 ms decoding, 120 ms with prefill of 1,000 tokens."""

from __future__ import annotations

import pytest

from ext_proc.groups import GroupAccount
from ext_proc.ledger import Ledger, Reservation
from ext_proc.phases import DECODE_SHARE_MARGIN, PhaseGate
from ext_proc.settings import Targets
from ext_proc.token_lead import (
    COMFORTABLE_LEAD_TOKENS,
    LONGEST_LAG_TOKENS,
    LONGEST_LEAD_TOKENS,
    PACE_SHARE,
    TokenLead,
)
from tests.builders import BUDGET_TOKENS, counters, group, pool, rank, report, request

TIGHT = Targets(ttft_s=2.0, tpot_s=0.05)
"""Steps with prefill break this TPOT, steps without keep it."""
LOOSE = Targets(ttft_s=2.0, tpot_s=0.5)


def lock_step_pool(targets: Targets = TIGHT, ranks: int = 2) -> Ledger:
    return pool(group("g0", ranks), targets=targets)


def place(ledger: Ledger, prompt_tokens: int, now_s: float, index: int = 0) -> Reservation:
    return ledger.reserve(rank(index), request(prompt_tokens=prompt_tokens), now_s)


def first_token(ledger: Ledger, now_s: float, seen: int, index: int = 0) -> None:
    """The rank reports that it has had so many first tokens in all."""
    ledger.record_report(rank(index), report(now_s, running=1, counters=counters(first_tokens=seen)))


def decoding(ledger: Ledger, now_s: float = 1.0) -> GroupAccount:
    """A group that decodes one request and prefills nothing; its lead is used up."""
    place(ledger, 100, now_s - 0.1)
    first_token(ledger, now_s, 1)
    gathered = ledger.groups[0]
    gathered.lead.tokens = 0.0
    return gathered


def until_s(gathered: GroupAccount) -> float:
    """The first moment at which a phase may start, to a millisecond."""
    gate = PhaseGate(gathered)
    milliseconds = next(ms for ms in range(10_000) if gate.may_start(gathered.phase_ended_s + ms / 1000))
    return gathered.phase_ended_s + milliseconds / 1000


def test_with_nobody_decoding_prefill_harms_nobody() -> None:
    ledger = lock_step_pool()
    ledger.groups[0].lead.tokens = 0.0
    assert PhaseGate(ledger.groups[0]).is_open


def test_where_steps_with_prefill_keep_the_target_nothing_is_held() -> None:
    assert PhaseGate(decoding(lock_step_pool(LOOSE))).is_open
    assert not PhaseGate(decoding(lock_step_pool(TIGHT))).is_open


def test_a_comfortable_lead_lets_prefill_start_at_any_time() -> None:
    gathered = decoding(lock_step_pool())
    gathered.lead.tokens = COMFORTABLE_LEAD_TOKENS
    assert PhaseGate(gathered).is_open


def test_between_phases_not_even_a_short_prompt_may_start() -> None:
    gate = PhaseGate(decoding(lock_step_pool()))
    assert gate.room_tokens(1.0) < 0


def test_in_a_phase_there_is_room_up_to_the_longest_prefill_under_way() -> None:
    ledger = lock_step_pool()
    gathered = decoding(ledger)
    place(ledger, 5000, 2.0, index=0)
    gathered.lead.tokens = 0.0
    gate = PhaseGate(gathered)
    assert gate.room_tokens(2.0) == pytest.approx(5000)
    tokens_per_s = BUDGET_TOKENS / 0.1201
    assert gate.room_tokens(2.3) == pytest.approx(5000 - 0.3 * tokens_per_s, rel=0.01)


def test_after_a_phase_decoding_gets_the_time_that_the_mean_tpot_needs() -> None:
    ledger = lock_step_pool()
    gathered = decoding(ledger)
    place(ledger, 4000, 2.0)
    first_token(ledger, 3.0, 2)
    gathered.lead.tokens = 0.0
    p, d, target = gathered.prefill_step_s, gathered.decode_step_s, 0.05
    n = gathered.phase_length_s / p
    m = (until_s(gathered) - gathered.phase_ended_s) / DECODE_SHARE_MARGIN / d
    assert (n * p + m * d) / (n + m) == pytest.approx(target, rel=0.02)


def test_no_phase_starts_before_decoding_had_its_share() -> None:
    ledger = lock_step_pool()
    gathered = decoding(ledger)
    place(ledger, 4000, 2.0)
    first_token(ledger, 3.0, 2)
    gathered.lead.tokens = 0.0
    gate = PhaseGate(gathered)
    assert not gate.may_start(gathered.phase_ended_s + 0.01)
    assert gate.may_start(gathered.phase_ended_s + gathered.phase_length_s)


def test_where_not_even_decoding_meets_the_target_nothing_is_held() -> None:
    assert PhaseGate(decoding(lock_step_pool(Targets(ttft_s=2.0, tpot_s=0.01)))).is_open


def test_prompts_that_pack_well_start_a_phase_at_once() -> None:
    gate = PhaseGate(decoding(lock_step_pool(ranks=4)))
    assert gate.phase_tokens([(1000, 0.0), (900, 0.0), (800, 0.0)]) == 1000


def test_a_long_prompt_waits_for_company_while_short_ones_start() -> None:
    gate = PhaseGate(decoding(lock_step_pool(ranks=4)))
    assert gate.phase_tokens([(9000, 0.0), (500, 0.0), (400, 0.0), (300, 0.0)]) == 500


def test_a_lone_prompt_starts_a_phase_when_its_patience_ends() -> None:
    gate = PhaseGate(decoding(lock_step_pool(ranks=4)))
    assert gate.phase_tokens([(9000, 0.05)]) == 0
    assert gate.phase_tokens([(9000, 0.11), (100, 0.0)]) == 9000


def test_nothing_held_starts_nothing() -> None:
    assert PhaseGate(decoding(lock_step_pool())).phase_tokens([]) == 0


def test_a_lead_grows_with_short_steps_and_shrinks_with_long_ones_within_bounds() -> None:
    lead = TokenLead()
    lead.tokens = 0.0
    lead.pass_time(1.0, step_s=0.02, target_s=0.05)
    assert lead.tokens == pytest.approx(1 / 0.02 - 1 / (PACE_SHARE * 0.05))
    lead.pass_time(100.0, step_s=0.02, target_s=0.05)
    assert lead.tokens == LONGEST_LEAD_TOKENS
    lead.pass_time(100.0, step_s=0.2, target_s=0.05)
    assert lead.tokens == -LONGEST_LAG_TOKENS
