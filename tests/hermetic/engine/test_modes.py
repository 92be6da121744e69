"""The other ways to run a group: internal, hybrid and headless, and several API servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.builders_group import FAST, RankProcess, eventually, rank, wait_until_serving
from tests.builders_ports import free_port


def served_by_engine(served: RankProcess, engines: Sequence[int]) -> list[int]:
    return [int(served.metric("vllm:request_success_total", engine=str(engine))) for engine in engines]


def send_many(served: RankProcess, count: int, **fields: Any) -> None:
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda index: served.complete(f"request {index}", **fields), range(count)))


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("score", ["current", "original"])
def test_internal_mode_balances_over_all_engines(kind: str, score: str) -> None:
    options = ("-dp", "3", "--api-server-count", "1", "--model-kind", kind, "--load-balancing-score", score)
    with rank(*options, *FAST) as served:
        assert (len(served.engines), len(served.coordinators)) == (3, 1)
        send_many(served, 48, max_tokens=20)
        assert min(served_by_engine(served, range(3))) >= 8
        assert sum(served_by_engine(served, range(3))) == 48


def test_an_explicit_rank_is_obeyed_in_internal_mode() -> None:
    with rank("-dp", "2", "--api-server-count", "1", *FAST) as served:
        for _ in range(5):
            served.post("/v1/completions", {"prompt": "x"}, headers={"X-data-parallel-rank": "1"})
        assert served_by_engine(served, range(2)) == [0, 5]
        status, _, body = served.request(
            "POST", "/v1/completions", {"prompt": "x"}, headers={"X-data-parallel-rank": "2"}
        )
        assert (status, json.loads(body)["error"]["message"]) == (
            400,
            "data_parallel_rank 2 is out of range [0, 2).",
        )


def test_several_api_servers_share_port_engines_and_metrics() -> None:
    with rank("-dp", "2", *FAST) as served:
        assert (len(served.children("api_process")), len(served.engines)) == (2, 2)
        send_many(served, 40)
        # Whichever server answers the scrape, it tells about all of them.
        assert {sum(served_by_engine(served, range(2))) for _ in range(8)} == {40}


def test_a_queue_limit_counts_over_all_api_servers() -> None:
    options = ("--api-server-count", "2", "--max-num-queued-reqs", "6", "--step-fixed-ms", "20")
    with rank(*options) as served, ThreadPoolExecutor(12) as threads:
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        statuses = list(threads.map(lambda _: served.request("POST", "/v1/completions", body)[0], range(12)))
        assert sorted(set(statuses)) == [200, 503]
        # The count is read and written without locks, as in vLLM: a few more may slip through.
        assert 6 <= statuses.count(200) <= 10


@contextmanager
def two_nodes(*, headless: bool) -> Iterator[list[RankProcess]]:
    common = ("-dp", "4", "-dpl", "2", "--data-parallel-rpc-port", str(free_port()), *FAST)
    first = (*common, "--api-server-count", "1", *(() if headless else ("--data-parallel-hybrid-lb",)))
    second = (*common, "-dpr", "2", *(("--headless",) if headless else ("--api-server-count", "1")))
    with rank(*first, wait=False) as head, rank(*second, wait=False) as other:
        wait_until_serving([head] if headless else [head, other])
        yield [head, other]


def test_hybrid_mode_balances_over_the_engines_of_its_node() -> None:
    with two_nodes(headless=False) as (head, other):
        assert (len(head.coordinators), len(other.coordinators)) == (1, 0)
        work = [threading.Thread(target=send_many, args=(node, 20)) for node in (head, other)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert sum(served_by_engine(head, (0, 1))) == 20
        assert min(served_by_engine(head, (0, 1))) >= 5
        assert min(served_by_engine(other, (2, 3))) >= 5
        nodes = (head, other)
        assert eventually(lambda: all(n.metric("embedded:data_parallel_running") == 0 for n in nodes))
        assert len({n.metric("embedded:data_parallel_wave") for n in nodes}) == 1


def test_a_headless_node_serves_through_the_head() -> None:
    with two_nodes(headless=True) as (head, other):
        assert (len(head.engines), len(other.engines)) == (2, 2)
        send_many(head, 40)
        assert min(served_by_engine(head, range(4))) >= 5
        assert other.health() is None
