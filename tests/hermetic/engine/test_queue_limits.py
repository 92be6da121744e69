"""Limits of a rank: what waits, what is refused, what is preempted, who goes first."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.builders_group import RankProcess, eventually, rank

LONG = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def send(threads: ThreadPoolExecutor, served: RankProcess, **fields: Any) -> Future[Any]:
    return threads.submit(served.post, "/v1/completions", {**LONG, **fields})


def test_a_full_queue_answers_503_that_is_safe_to_retry(threads: ThreadPoolExecutor) -> None:
    with rank("--max-num-queued-reqs", "2", "--step-fixed-ms", "5") as served:
        under_way = [send(threads, served), send(threads, served)]
        assert eventually(lambda: served.metric("vllm:num_requests_running") == 2)
        status, _, body = served.request("POST", "/v1/completions", {"prompt": "x"})
        error = json.loads(body)["error"]
        assert (status, error["type"], error["code"]) == (503, "Service Unavailable", 503)
        assert error["message"].startswith("The engine is currently busy and cannot accept new requests.")
        status, _, _ = served.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
        assert status == 503
        assert served.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
        for future in under_way:
            assert future.result()["usage"]["completion_tokens"] == 400
        served.complete()


def test_choices_count_one_by_one() -> None:
    with rank("--max-num-queued-reqs", "2") as served:
        assert served.request("POST", "/v1/completions", {"prompt": "x", "n": 3})[0] == 503
        assert served.request("POST", "/v1/completions", {"prompt": "x", "n": 2})[0] == 200


def test_a_prefill_backlog_answers_503(threads: ThreadPoolExecutor) -> None:
    options = ("--max-num-queued-tokens", "1000", "--prefill-us-per-token", "1000")
    with rank(*options, "--enable-server-load-tracking") as served:
        long_prompt = send(threads, served, prompt="x" * 8_000, max_tokens=1)
        assert eventually(lambda: json.loads(served.get("/load")) == {"server_load": 1})
        assert served.request("POST", "/v1/completions", {"prompt": "x"})[0] == 503
        assert served.metric("vllm:admission_rejections_total", reason="max_num_queued_tokens") >= 1
        long_prompt.result()
        served.complete()


def test_more_than_a_batch_waits(threads: ThreadPoolExecutor) -> None:
    with rank("--max-num-seqs", "2", "--step-fixed-ms", "5") as served:
        futures = [send(threads, served, max_tokens=100) for _ in range(5)]
        assert eventually(lambda: served.metric("vllm:num_requests_waiting") == 3)
        assert served.metric("vllm:num_requests_running") == 2
        for future in futures:
            future.result()
        assert served.metric("vllm:num_requests_waiting") == 0
        assert served.metric("vllm:request_queue_time_seconds_sum") > 0.4


def test_requests_that_outgrow_the_cache_are_preempted_and_finish_all_the_same(
    threads: ThreadPoolExecutor,
) -> None:
    options = ("--num-gpu-blocks", "41", "--max-model-len", "512", "--time-scale", "10")
    with rank(*options) as served:
        futures = [send(threads, served, prompt=f"prompt {index}", max_tokens=300) for index in range(6)]
        texts = [future.result()["choices"][0]["text"] for future in futures]
        assert served.metric("vllm:num_preemptions_total") > 0
        # A preempted request goes on where it was: its text is the same as without preemption.
        assert texts[5] == served.complete("prompt 5", max_tokens=300, ignore_eos=True)["choices"][0]["text"]
        assert served.metric("vllm:kv_cache_usage_perc") == 0


def test_the_urgent_request_goes_first_under_the_priority_policy(threads: ThreadPoolExecutor) -> None:
    options = ("--max-num-seqs", "1", "--scheduling-policy", "priority", "--step-fixed-ms", "5")
    with rank(*options) as served:
        blocker = send(threads, served, max_tokens=100)
        assert eventually(lambda: served.metric("vllm:num_requests_running") == 1)
        ends: dict[str, float] = {}

        def finish(name: str, priority: int, headers: dict[str, str] | None = None) -> None:
            body = {**LONG, "max_tokens": 20, "priority": priority}
            served.post("/v1/completions", body, headers=headers or {})
            ends[name] = time.monotonic()

        later = [
            threads.submit(finish, "patient", 5),
            threads.submit(finish, "urgent", -5),
            threads.submit(finish, "most urgent by header", 9, {"X-Vllm-Priority": "-9"}),
        ]
        assert eventually(lambda: served.metric("vllm:num_requests_waiting") == 3)
        for future in (blocker, *later):
            future.result()
        assert sorted(ends, key=lambda name: ends[name]) == ["most urgent by header", "urgent", "patient"]


def test_load_counts_requests_under_way_only_if_tracked(threads: ThreadPoolExecutor) -> None:
    with rank("--enable-server-load-tracking", "--step-fixed-ms", "5") as served:
        future = send(threads, served, max_tokens=150)
        assert eventually(lambda: json.loads(served.get("/load")) == {"server_load": 1})
        future.result()
        assert json.loads(served.get("/load")) == {"server_load": 0}
