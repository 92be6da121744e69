"""vLLM's internal balancing formula, and the one it had before."""

from __future__ import annotations

import pytest

from vllm_ranks.engine.arguments import LoadBalancingScore
from vllm_ranks.engine.client_lb import EngineBalancer
from vllm_ranks.engine.waves import EngineCounts


def balancer(
    *counts: EngineCounts, score: LoadBalancingScore = "current", index: int = 0, clients: int = 1
) -> EngineBalancer:
    chooser = EngineBalancer(len(counts), score, index, clients)
    chooser.set_counts(counts)
    return chooser


def engine(waiting: int = 0, running: int = 0, kv: float = 0.0) -> EngineCounts:
    return EngineCounts(waiting, running, kv)


def test_idle_engines_take_turns() -> None:
    chooser = balancer(engine(), engine(), engine())
    assert [chooser.choose() for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_engine_with_the_fewest_requests_is_chosen() -> None:
    assert balancer(engine(1, 5), engine(0, 3), engine(2, 2)).choose() == 1


def test_own_requests_count_even_if_the_published_counts_forget_them() -> None:
    chooser = balancer(engine(), engine())
    chooser.in_flight[0] = 4
    assert chooser.choose() == 1
    chooser.set_counts([engine(), engine(0, 2)])
    assert chooser.choose() == 1


def test_own_requests_are_scaled_by_the_number_of_clients() -> None:
    chooser = balancer(engine(), engine(0, 3), clients=4)
    chooser.in_flight[0] = 1
    assert chooser.choose() == 1


def test_a_queue_behind_a_full_kv_cache_weighs_more() -> None:
    assert balancer(engine(2, 2, kv=1.0), engine(0, 9)).choose() == 1  # 4 + 2 × 6 × 0.5 = 10
    assert balancer(engine(2, 2, kv=0.5), engine(0, 9)).choose() == 0


def test_every_client_starts_its_scan_elsewhere() -> None:
    idle = [engine()] * 4
    assert [balancer(*idle, index=index, clients=4).choose() for index in range(4)] == [0, 1, 2, 3]


def test_each_choice_counts_as_waiting_for_all_clients_until_the_next_word() -> None:
    chooser = balancer(engine(0, 1), engine(0, 2), clients=2)
    assert chooser.choose() == 0  # now counts as 3
    assert chooser.choose() == 1


@pytest.mark.parametrize(("score", "expected"), [("current", 0), ("original", 1)])
def test_the_original_formula_weighs_waiting_four_times(score: LoadBalancingScore, expected: int) -> None:
    assert balancer(engine(2, 0), engine(0, 7), score=score).choose() == expected
