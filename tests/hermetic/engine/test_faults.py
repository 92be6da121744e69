"""Failures as a load balancer sees them, switched on while a rank runs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.builders_group import RankProcess, eventually, group, rank

OPTIONS = ("--enable-fault-injection", "--step-fixed-ms", "5", "--engine-dead-grace-seconds", "2")
LONG = {"prompt": "go on", "max_tokens": 20_000, "ignore_eos": True}


@pytest.fixture
def served() -> Iterator[RankProcess]:
    with rank(*OPTIONS) as started:
        yield started


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def running(served: RankProcess, expected: int) -> bool:
    return eventually(lambda: served.metric("vllm:num_requests_running") == expected)


def send(
    threads: ThreadPoolExecutor, served: RankProcess, body: dict[str, Any]
) -> Future[tuple[int, dict[str, str], bytes]]:
    return threads.submit(served.request, "POST", "/v1/completions", body)


def was_cut_short(stream: Future[tuple[int, dict[str, str], bytes]]) -> bool:
    """Whether its connection was cut, or it ends with an error: which of the two is a race, as with vLLM."""
    return stream.exception() is not None or b'"finish_reason":"length"' not in stream.result()[2]


@pytest.mark.parametrize("by", ["exception", "kill"])
def test_engine_death(served: RankProcess, threads: ThreadPoolExecutor, by: str) -> None:
    unary = send(threads, served, LONG)
    stream = send(threads, served, {**LONG, "stream": True})
    assert running(served, 2)
    served.fault("engine_death", by=by)

    status, _, body = unary.result()
    assert status == 500
    assert json.loads(body)["error"]["message"].startswith("EngineCore encountered an issue.")
    assert json.loads(body)["error"]["type"] == "InternalServerError"
    status, _, body = stream.result()
    *_, error, done, rest = body.split(b"\n\n")
    assert (status, done, rest) == (200, b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500
    assert served.health() == 503
    assert served.request("POST", "/v1/completions", {"prompt": "x"})[0] == 500
    assert served.wait() == 1


def test_a_peers_death_takes_the_group_down() -> None:
    with group(2, *OPTIONS) as (survivor, victim):
        survivor.complete()
        victim.fault("engine_death", by="kill")
        assert survivor.wait() == 1
        assert "Connection closed by peer: rank 1" in survivor.log


def test_a_peers_death_hangs_the_group_with_health_200(threads: ThreadPoolExecutor) -> None:
    options = (*OPTIONS, "--on-peer-death", "hang", "--cpu-distributed-timeout-seconds", "3")
    with group(2, *options) as (survivor, victim):
        survivor.complete()
        victim.process.kill()
        victim.process.wait()
        hanging = send(threads, survivor, LONG)
        time.sleep(1)
        assert survivor.health() == 200
        assert not hanging.done()
        # Until the collective's timeout, which is fatal.
        assert hanging.result()[0] == 500
        assert survivor.wait() == 1
        assert "Timed out waiting 3 s" in survivor.log


def test_what_a_peers_death_does_can_be_switched() -> None:
    with group(2, *OPTIONS) as (survivor, victim):
        survivor.fault("peer_death", policy="hang")
        victim.process.kill()
        victim.process.wait()
        time.sleep(1)
        assert survivor.health() == 200
        assert survivor.process.poll() is None


def test_coordinator_death_is_not_noticed_until_the_group_sleeps(threads: ThreadPoolExecutor) -> None:
    with group(2, *OPTIONS) as (first, second):
        first.complete()
        assert eventually(lambda: second.metric("embedded:data_parallel_running") == 0)
        first.fault("coordinator_death")
        assert second.request("POST", "/fault_injection", {"fault": "coordinator_death"})[0] == 400
        # Nobody wakes the other rank: the request waits in its first collective, and all look healthy.
        lost = send(threads, second, {"prompt": "x"})
        time.sleep(1)
        assert not lost.done()
        assert [first.health(), second.health()] == [200, 200]
        first.end()
        assert lost.result()[0] == 500


def test_a_hanging_rank_stops_the_group_and_its_metrics(threads: ThreadPoolExecutor) -> None:
    with group(2, *OPTIONS) as (first, second):
        stream = send(threads, second, {**LONG, "max_tokens": 300, "stream": True})
        assert running(second, 1)
        first.fault("hang")
        time.sleep(0.5)
        before = second.metric("vllm:iteration_tokens_total_count")
        time.sleep(0.5)
        assert second.metric("vllm:iteration_tokens_total_count") == before
        assert [first.health(), second.health()] == [200, 200]
        first.fault("hang", on=False)
        assert stream.result()[2].endswith(b"data: [DONE]\n\n")


def test_drain(served: RankProcess, threads: ThreadPoolExecutor) -> None:
    before = send(threads, served, {"prompt": "before", "max_tokens": 100, "ignore_eos": True})
    assert running(served, 1)
    served.fault("drain")
    status, _, body = served.request("POST", "/v1/completions", {"prompt": "new"})
    assert (status, json.loads(body)["choices"][0]["finish_reason"]) == (200, "abort")
    status, _, body = served.request(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    assert status == 200
    assert b'"finish_reason":"abort"' in body
    assert served.health() == 200
    assert json.loads(before.result()[2])["usage"]["completion_tokens"] == 100
    served.fault("drain", on=False)
    assert served.complete()["choices"][0]["finish_reason"] == "length"


def test_slowdown(served: RankProcess) -> None:
    def inter_token_s() -> float:
        names = ("vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count")
        before = [served.metric(name) for name in names]
        served.complete(max_tokens=10, ignore_eos=True)
        seconds, count = (served.metric(name) - b for name, b in zip(names, before, strict=True))
        return seconds / count

    served.fault("slowdown", factor=20)
    assert inter_token_s() > 0.09
    served.fault("slowdown", factor=1)
    assert inter_token_s() < 0.09


def test_refuse(served: RankProcess) -> None:
    served.fault("refuse")
    status, _, body = served.request("POST", "/v1/completions", {"prompt": "x"})
    assert (status, json.loads(body)["error"]["type"]) == (503, "Service Unavailable")
    assert served.health() == 200
    served.fault("refuse", on=False)
    served.complete()


def test_delay_headers(served: RankProcess) -> None:
    served.fault("delay_headers", seconds=0.5)
    started_s = time.monotonic()
    served.complete()
    assert time.monotonic() - started_s >= 0.5
    served.fault("delay_headers", seconds=0)


def test_what_is_in_force_can_be_read(served: RankProcess) -> None:
    served.fault("slowdown", factor=2)
    assert json.loads(served.get("/fault_injection")) == {"slowdown": {"factor": 2.0}}


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "earthquake"},
        {},
        {"fault": "slowdown"},
        {"fault": "slowdown", "factor": -1},
        {"fault": "delay_headers", "seconds": -1},
        {"fault": "engine_death", "by": "boredom"},
        {"fault": "peer_death", "policy": "mourn"},
        {"fault": "coordinator_death"},
    ],
)
def test_nonsense_is_a_400_and_changes_nothing(served: RankProcess, fault: dict[str, Any]) -> None:
    assert served.request("POST", "/fault_injection", fault)[0] == 400
    assert json.loads(served.get("/fault_injection")) == {}
    served.complete()


# --- SIGTERM --------------------------------------------------------------------------------------------


def test_sigterm_cuts_everything_at_once(threads: ThreadPoolExecutor) -> None:
    with rank("--step-fixed-ms", "5") as served:
        stream = send(threads, served, {**LONG, "stream": True})
        assert running(served, 1)
        served.process.send_signal(signal.SIGTERM)
        assert served.wait(5) == 0
        assert was_cut_short(stream)


def test_sigterm_with_a_timeout_drains_what_is_under_way_and_aborts_what_is_new(
    threads: ThreadPoolExecutor,
) -> None:
    with rank("--step-fixed-ms", "5", "--shutdown-timeout", "20") as served:
        under_way = send(threads, served, {"prompt": "x", "max_tokens": 200, "ignore_eos": True})
        assert running(served, 1)
        served.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "draining 1 in-flight" in served.log)
        assert served.complete("new")["choices"][0]["finish_reason"] == "abort"
        assert served.health() == 200
        assert json.loads(under_way.result()[2])["usage"]["completion_tokens"] == 200
        assert served.wait(5) == 0


def test_a_drain_ends_at_its_timeout(threads: ThreadPoolExecutor) -> None:
    with rank("--step-fixed-ms", "5", "--shutdown-timeout", "1") as served:
        stream = send(threads, served, {**LONG, "stream": True})
        assert running(served, 1)
        served.process.send_signal(signal.SIGTERM)
        assert served.wait(8) == 0
        assert was_cut_short(stream)


def test_a_draining_rank_cannot_leave_while_the_group_works(threads: ThreadPoolExecutor) -> None:
    with group(2, "--step-fixed-ms", "5", "--shutdown-timeout", "20") as (idle, busy):
        work = send(threads, busy, {"prompt": "x", "max_tokens": 200, "ignore_eos": True})
        assert running(busy, 1)
        idle.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert idle.process.poll() is None
        assert json.loads(work.result()[2])["usage"]["completion_tokens"] == 200
        assert idle.wait(5) == 0
