"""Whatever a rank answers to what the gateway asks it, the gateway goes on, and so do the other ranks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext_proc.vocabulary import Rank
from gateway.warm_up import Complaint, complaint
from tests.builders_gateway import Gateway, running_gateway
from tests.builders_ranks import StandInRank
from tests.hermetic.conftest import chat, whole_body
from vllm_ranks.reports import kv_subscriber
from vllm_ranks.reports.asking import keep_asking

METRICS, HEALTH, SOURCES, COMPLETIONS = "/metrics", "/health", "/kv_event_sources", "/v1/completions"
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
COUNTERS = (
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:prompt_tokens_by_source_total",
    "vllm:iteration_tokens_total_count",
    "embedded:data_parallel_wave",
)


# --- Answers ------------------------------------------------------------------------------------------


def http(body: bytes, status: int = 200, *headers: str) -> bytes:
    """An answer of one piece."""
    usual = (f"content-length: {len(body)}", "content-type: application/json", "connection: close")
    head = [f"HTTP/1.1 {status} As It Is", *usual, *headers]
    return "\r\n".join((*head, "", "")).encode() + body


def page(*values: float | str) -> bytes:
    """A page with a value for each gauge and counter."""
    lines = (
        f'{name}{{engine="0"}} {value}\n' for name, value in zip((*GAUGES, *COUNTERS), values, strict=True)
    )
    return "".join(lines).encode()


GOOD: dict[str, bytes] = {
    METRICS: http(page(*[0] * 9)),
    HEALTH: http(b""),
    SOURCES: http(b"{}"),
    COMPLETIONS: http(b'{"choices": [{"finish_reason": "length"}]}'),
}

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
any_value = (
    st.integers(0, 100)
    | st.sampled_from(["NaN", "+Inf", "-Inf", "-1", "1e308", "-0.5", "9" * 400, "", "1 2 3", "x"])
    | st.floats()
    | st.integers()
)
any_label = st.integers() | st.text(st.characters(exclude_characters='"\\\n'), max_size=10)
any_page = st.builds(
    lambda values, blocks, size: (
        page(*values)
        + f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="{size}"}} 1.0\n'.encode(
            errors="replace"
        )
    ),
    st.lists(any_value, min_size=9, max_size=9) | st.lists(st.integers(0, 2**54), min_size=9, max_size=9),
    any_label,
    any_label,
)
any_address = (
    st.sampled_from(
        [
            "tcp://host",
            "tcp://",
            "udp://x:1",
            "ipc:///nowhere/x",
            "tcp://127.0.0.1:1",
            "inproc://x",
            "tcp://*:x",
        ]
    )
    | st.text()
)
any_sources = st.fixed_dictionaries(
    {},
    optional={
        "0": any_json
        | st.fixed_dictionaries(
            {"endpoint": any_address | any_json},
            optional={"replay_endpoint": any_address | any_json, "topic": any_json},
        )
    },
).map(lambda sources: json.dumps(sources).encode())
any_body = st.binary() | any_json.map(lambda value: json.dumps(value).encode())
any_header = st.sampled_from(
    [
        "content-encoding: gzip",
        "content-encoding: nonsense",
        "content-type: application/json; charset=nonsense",
        "content-length: -1",
        "transfer-encoding: chunked",
        "location: unix:///x",
        "location: http://[",
        "set-cookie: \x01=\x7f; expires=x",
        "x" * 9000,
    ]
)


def any_answer(body: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Mostly HTTP with such a body, and anything else."""
    return (
        st.builds(
            lambda body, status, headers: http(body, status, *headers),
            body | any_body,
            st.just(200) | st.integers(100, 999),
            st.lists(any_header, max_size=2),
        )
        | st.builds(lambda body: http(body)[:-1] if body else b"", body)
        | st.binary()
    )


any_answers = st.fixed_dictionaries(
    {
        METRICS: any_answer(any_page),
        HEALTH: any_answer(st.just(b"")),
        SOURCES: any_answer(any_sources),
    }
)


# --- A rank that gives them ---------------------------------------------------------------------------


class NonsenseRank:
    """Answers with whatever bytes it is told to."""

    def __init__(self) -> None:
        self.answers = dict(GOOD)
        self.asked = dict.fromkeys(GOOD, 0)
        self.endpoint = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.asked[path] = self.asked.get(path, 0) + 1
            writer.write(self.answers.get(path, b""))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Scene:
    """A gateway over that rank and one that is as it should be."""

    def __init__(self, gateway: Gateway, strange: NonsenseRank, good: StandInRank) -> None:
        self.gateway = gateway
        self.strange = strange
        self.good = good

    async def until_dealt_with(self) -> None:
        """Asked three times more on each path: the answers in between have been taken in."""
        asked = self.strange.asked
        wanted = {path: asked[path] + 3 for path in (METRICS, HEALTH, SOURCES)}
        async with asyncio.timeout(20):
            while any(asked[path] < count for path, count in wanted.items()):
                assert not self.gateway.serving.done()
                await asyncio.sleep(0.005)

    async def is_in_rotation(self, group: str) -> bool:
        answer: dict[str, Any] = await (await self.gateway.get(f"/groups/{group}")).json()
        return bool(answer["in_rotation"])


@pytest.fixture
async def scene(
    unused_tcp_port_factory: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """Two groups of one rank each, both asked often."""
    monkeypatch.setattr(kv_subscriber, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(kv_subscriber, "REPLAY_TIMEOUT_S", 0.05)
    async with (
        NonsenseRank() as strange,
        StandInRank() as good,
        running_gateway(
            [
                {"name": name, "engine": "adopted", "model": "m", "endpoints": [rank.endpoint]}
                for name, rank in (("strange", strange), ("good", good))
            ],
            unused_tcp_port_factory,
            supervision={"health_interval_s": 0.02, "health_timeout_s": 0.5},
        ) as gateway,
    ):
        yield Scene(gateway, strange, good)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(answers=any_answers)
@pytest.mark.timeout(300)
async def test_no_answer_of_a_rank_ends_the_gateway(scene: Scene, answers: dict[str, bytes]) -> None:
    scene.strange.answers |= answers
    await scene.until_dealt_with()
    assert not scene.gateway.serving.done()
    for path in ("/livez", "/status", "/metrics"):
        assert (await scene.gateway.get(path)).status == 200
    stream = scene.gateway.client.open()
    reply = await scene.gateway.client.exchange(stream, whole_body(chat()))
    await stream.done_writing()
    picked = reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"].split(",")
    assert scene.good.endpoint in picked
    assert await scene.is_in_rotation("good")


async def test_a_rank_that_comes_to_its_senses_serves_again(scene: Scene) -> None:
    scene.strange.answers |= {
        METRICS: http(b"nonsense"),
        HEALTH: b"nonsense",
        SOURCES: http(b'{"0": {"endpoint": "tcp://host"}}'),
    }
    async with asyncio.timeout(20):
        while await scene.is_in_rotation("strange"):
            await asyncio.sleep(0.01)
        await scene.until_dealt_with()
        scene.strange.answers |= GOOD
        while not await scene.is_in_rotation("strange"):
            await asyncio.sleep(0.01)
    assert scene.strange.asked[COMPLETIONS] > 0


any_completion = any_answer(
    st.fixed_dictionaries({"choices": any_json}).map(lambda answer: json.dumps(answer).encode())
)


@settings(max_examples=60, deadline=None)
@given(answer=any_completion)
async def test_any_answer_to_a_trial_request_is_a_complaint_or_none(answer: bytes) -> None:
    async with NonsenseRank() as rank, aiohttp.ClientSession() as session:
        rank.answers[COMPLETIONS] = answer
        assert isinstance(await complaint(session, rank.endpoint, "m", 5.0), Complaint | None)


# --- Errors of our own --------------------------------------------------------------------------------


@asynccontextmanager
async def asking(ask: Callable[[], Any], failed: Callable[[str], None]) -> AsyncIterator[None]:
    """Ask a rank every millisecond."""
    rank = Rank("g", 0, "127.0.0.1:1")
    task = asyncio.create_task(keep_asking(rank, ask, failed=failed, pause_s=lambda: 0.001))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_error_nobody_foresaw_counts_as_a_failure_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    errors: list[Exception] = [KeyError("a"), KeyError("b"), ZeroDivisionError("x" * 10_000), KeyError("c")]
    left, failures, done = list(errors), list[str](), asyncio.Event()

    async def ask() -> None:
        if left:
            raise left.pop(0)
        done.set()

    async with asking(ask, failures.append):
        await asyncio.wait_for(done.wait(), 10)
    assert [failure[:26] for failure in failures[:2]] == ["unexpected error: KeyError"] * 2
    assert len(failures) == len(errors)
    assert max(map(len, failures)) < 400
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert logged == [KeyError, ZeroDivisionError]


async def test_asking_ends_when_it_is_cancelled() -> None:
    asked = asyncio.Event()

    async def ask() -> None:
        asked.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        async with asking(ask, lambda _why: None):
            await asked.wait()
