"""When a lock-step group may prefill. Steps: 20 ms decoding, 120 ms with prefill of 1,000 tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.ledger import Ledger
from ext_proc.phases import PhaseGate
from ext_proc.settings import Targets
from ext_proc.token_lead import LONGEST_LAG_TOKENS, LONGEST_LEAD_TOKENS, PACE_SHARE, TokenLead
from tests.builders import (
    BUDGET_TOKENS,
    STALE_AFTER_S,
    TIGHT,
    behind,
    got_tokens,
    group,
    pool,
    rank,
    report,
    request,
)

LOOSE = Targets(ttft_s=2.0, tpot_s=0.5)
PACE_S = PACE_SHARE * TIGHT.tpot_s


def gate(ledger: Ledger, from_requests_per_rank: float = 2.5) -> PhaseGate:
    return PhaseGate(ledger.groups[0], from_requests_per_rank)


def is_open(ledger: Ledger, now_s: float = 1.0) -> bool:
    return gate(ledger).is_open(now_s)


def decode_undisturbed(ledger: Ledger, from_s: float, until_s: float) -> None:
    """Every request gets a token per 20 ms, and the ranks report."""
    steps = round((until_s - from_s) / 0.02)
    for index, account in enumerate(ledger.accounts):
        tokens = steps * account.decoding_sequences
        got_tokens(ledger, index, until_s, tokens=tokens, each_after_s=0.02)


def test_with_nobody_decoding_prefill_harms_nobody() -> None:
    assert is_open(pool(group("g0", 2), targets=TIGHT))


def test_while_decoding_is_behind_not_even_a_short_prompt_may_start() -> None:
    assert not is_open(behind())
    assert gate(behind()).room_tokens(1.0) < 0


def test_when_decoding_has_caught_up_prefill_may_start() -> None:
    ledger = behind()
    lag = -ledger.groups[0].lead.tokens
    needs_s = lag / (1 / 0.02 - 1 / PACE_S)
    decode_undisturbed(ledger, 1.0, 1.0 + 0.5 * needs_s)
    assert not is_open(ledger, 1.0 + 0.5 * needs_s)
    decode_undisturbed(ledger, 1.0 + 0.5 * needs_s, 1.04 + needs_s)
    assert is_open(ledger, 1.04 + needs_s)


def test_where_steps_with_prefill_keep_the_target_nothing_waits() -> None:
    assert is_open(behind(targets=LOOSE))


def test_where_not_even_decoding_keeps_the_pace_nothing_waits() -> None:
    assert is_open(behind(targets=Targets(ttft_s=2.0, tpot_s=0.02)))


def test_with_little_to_decode_nothing_waits() -> None:
    assert is_open(behind(per_rank=2))
    assert not is_open(behind(per_rank=3))


def test_unless_it_is_told_to_put_the_tpot_first_even_then() -> None:
    assert not gate(behind(per_rank=1), from_requests_per_rank=0).is_open(1.0)
    assert gate(pool(group("g0", 2), targets=TIGHT), from_requests_per_rank=0).is_open(1.0)


def test_a_lead_that_nobody_has_measured_lately_holds_nothing() -> None:
    assert not is_open(behind(), 1.0 + STALE_AFTER_S)
    assert is_open(behind(), 1.01 + STALE_AFTER_S)


def test_in_a_phase_there_is_room_up_to_the_longest_prefill_under_way() -> None:
    ledger = behind()
    ledger.reserve(rank(0), request(prompt_tokens=5000), 2.0)
    assert gate(ledger).room_tokens(2.0) == pytest.approx(5000)
    tokens_per_s = BUDGET_TOKENS / 0.1205
    assert gate(ledger).room_tokens(2.3) == pytest.approx(5000 - 0.3 * tokens_per_s, rel=0.01)


def test_the_lead_is_what_a_groups_requests_got_beyond_the_pace() -> None:
    ledger = behind(ranks=2)
    before = ledger.groups[0].lead.tokens
    got_tokens(ledger, 1, 1.1, tokens=9, each_after_s=0.04)
    assert ledger.groups[0].lead.tokens - before == pytest.approx((9 - 9 * 0.04 / PACE_S) / 7)


def test_the_lead_counts_the_requests_of_others_whose_tokens_it_counts() -> None:
    ledger = behind(ranks=2)
    ledger.record_report(rank(1), report(1.1, running=3 + 6, counters=ledger.accounts[1].report.counters))
    ledger.pass_time(1.2)
    before = ledger.groups[0].lead.tokens
    got_tokens(ledger, 1, 1.2, tokens=9, each_after_s=0.04)
    assert ledger.groups[0].lead.tokens - before == pytest.approx((9 - 9 * 0.04 / PACE_S) / (7 + 6))


def test_whoever_starts_to_decode_where_nobody_did_owes_nothing() -> None:
    ledger = pool(group("g0", 2), targets=TIGHT)
    ledger.groups[0].lead.record(1, 10.0, sequences=1, target_s=0.05)
    ledger.pass_time(1.0)
    assert ledger.groups[0].lead.tokens == 0


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.001, 1.0), st.integers(1, 100)), max_size=30))
def test_a_lead_is_bounded_and_rises_and_falls_with_the_pace(spans: list[tuple[int, float, int]]) -> None:
    lead = TokenLead()
    for tokens, each_s, sequences in spans:
        before = lead.tokens
        lead.record(tokens, tokens * each_s, sequences=sequences, target_s=0.05)
        assert -LONGEST_LAG_TOKENS <= lead.tokens <= LONGEST_LEAD_TOKENS
        assert lead.tokens >= before if each_s <= PACE_S else lead.tokens <= before
