"""A group in external mode: start-up, lock step and waves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.builders_group import FAST, RankProcess, eventually, group


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankProcess]]:
    with group(3, *FAST) as started:
        yield started


def waves(ranks: list[RankProcess]) -> set[float]:
    return {rank.metric("embedded:data_parallel_wave") for rank in ranks}


def running(ranks: list[RankProcess]) -> set[float]:
    return {rank.metric("embedded:data_parallel_running") for rank in ranks}


def test_a_group_of_four_starts_in_seconds() -> None:
    started_s = time.monotonic()
    with group(4):
        assert time.monotonic() - started_s < 15  # about 2.5 on two free cores


def test_no_rank_answers_before_the_whole_group_is_ready() -> None:
    with group(2, wait=False) as (first, second):
        second.process.terminate()
        second.process.wait(10)
        assert eventually(lambda: bool(first.coordinators) and bool(first.engines))
        time.sleep(1)
        assert first.health() is None


def test_only_rank_0_has_a_coordinator(ranks: list[RankProcess]) -> None:
    assert [len(rank.coordinators) for rank in ranks] == [1, 0, 0]
    assert [len(rank.engines) for rank in ranks] == [1, 1, 1]


def test_every_rank_serves_with_its_own_engine_label(ranks: list[RankProcess]) -> None:
    for index, rank in enumerate(ranks):
        rank.complete()
        assert rank.metric("vllm:request_success_total", engine=str(index)) >= 1


def test_a_request_to_any_sleeping_rank_wakes_the_group_and_a_wave_ends(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        assert eventually(lambda: running(ranks) == {0})
        (before,) = waves(ranks)
        rank.complete(max_tokens=40)
        assert eventually(lambda before=before: waves(ranks) == {before + 1})  # type: ignore[misc]


def test_requests_that_arrive_just_as_a_wave_ends_wake_it_again(ranks: list[RankProcess]) -> None:
    # 16 tokens end with the agreement at step 16: the next request meets a group that has just gone to sleep,
    # while its front end still believes it to be awake.
    for _ in range(25):
        assert ranks[1].complete(max_tokens=16, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_ranks_agree_on_the_wave_at_rest_after_concurrent_requests(ranks: list[RankProcess]) -> None:
    def some_requests(rank: RankProcess) -> None:
        for length in (3, 30, 1, 17):
            rank.complete(max_tokens=length)

    with ThreadPoolExecutor() as threads:
        list(threads.map(some_requests, ranks * 3))
    assert eventually(lambda: running(ranks) == {0} and len(waves(ranks)) == 1)


def test_x_data_parallel_rank_is_local_to_the_server(ranks: list[RankProcess]) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert ranks[1].request("POST", "/v1/completions", body, headers={"X-data-parallel-rank": "0"})[0] == 200
    assert ranks[1].request("POST", "/v1/completions", body, headers={"X-data-parallel-rank": "1"})[0] == 400


def inter_token_s(rank: RankProcess) -> float:
    total = rank.metric("vllm:inter_token_latency_seconds_sum")
    return total / rank.metric("vllm:inter_token_latency_seconds_count")


def test_a_step_lasts_as_long_as_on_the_slowest_rank() -> None:
    # Steps of 10 ms; rank 1 alone needs 80 ms for each, even for a dummy batch.
    options = ("--step-fixed-ms", "10", "--decode-us-per-sequence", "0", "--kv-ns-per-token", "0")
    with group(2, *options, rank1=("--slowdown", "8")) as (healthy, _slow):
        healthy.complete(max_tokens=12, ignore_eos=True)
        assert inter_token_s(healthy) > 0.075


def test_idle_ranks_step_along_and_report_nothing(ranks: list[RankProcess]) -> None:
    eventually(lambda: running(ranks) == {0})
    steps = ranks[2].metric("vllm:iteration_tokens_total_count")
    ranks[0].complete(max_tokens=64, ignore_eos=True)
    assert ranks[2].metric("vllm:iteration_tokens_total_count") == steps


def test_a_step_trace_shows_real_and_dummy_steps_of_a_wave(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("trace")
    with group(2, *FAST, "--step-trace", f"{folder}/rank{{rank}}.jsonl") as ranks:
        ranks[0].complete(max_tokens=20, ignore_eos=True)
        assert eventually(lambda: running(ranks) == {0})
        assert eventually(lambda: waves(ranks) == {1})
    traces = [
        [json.loads(line) for line in (folder / f"rank{index}.jsonl").read_text().splitlines()]
        for index in (0, 1)
    ]
    kinds = [[step["kind"] for step in trace] for trace in traces]
    # 20 tokens are 20 steps; a wave lasts 1 step or a multiple of 16.
    assert kinds[0] == ["model"] * 20 + ["dummy"] * 12
    assert kinds[1] == ["dummy"] * 32
    assert [step["step_cost_s"] for step in traces[0]] == [step["step_cost_s"] for step in traces[1]]
