"""Groups that do not serve leave rotation, and come back once each rank has answered a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from ext_proc.reservation import Outcome, Reservation
from ext_proc.vocabulary import CallKind, RequestFacts
from gateway.access_entries import SERVICE_NAME
from gateway.config import Config
from gateway.server import GatewayServer
from tests.builders_ranks import StandInRank

LIMIT_S = 10.0


class Scene:
    """A gateway over one group of two stand-ins, asked through its admin API."""

    def __init__(self, config: Config, http: aiohttp.ClientSession, ranks: list[StandInRank]) -> None:
        self.server = GatewayServer(config)
        self.ranks = ranks
        self._http = http
        self.ext_proc = config.gateway.ext_proc_listen
        self._url = f"http://127.0.0.1:{config.gateway.admin_port}/groups"

    async def group(self) -> Any:
        """What the gateway says about the group."""
        async with self._http.get(f"{self._url}/g0") as answer:
            return await answer.json()

    async def put(self, body: Any, *, group: str = "g0") -> tuple[int, str]:
        """Take the group out of rotation, or bring it back."""
        async with self._http.put(f"{self._url}/{group}/rotation", json=body) as answer:
            return answer.status, await answer.text()

    async def tell_failed_answer(self, rank: int) -> None:
        """Report through the access log that a rank has answered a client with an error, as Envoy does."""
        host, port = self.ranks[rank].endpoint.split(":")
        message = StreamAccessLogsMessage()
        entry = message.http_logs.log_entry.add()
        entry.common_properties.upstream_remote_address.socket_address.address = host
        entry.common_properties.upstream_remote_address.socket_address.port_value = int(port)
        entry.response.response_code.value = 500
        async with grpc.aio.insecure_channel(self.ext_proc) as channel:
            call = channel.stream_unary(f"/{SERVICE_NAME}/StreamAccessLogs")
            await call(iter([message.SerializeToString()]))

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """The first state of the group for which `condition` holds."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    if condition(state := await self.group()):
                        return state
                except aiohttp.ClientConnectorError:
                    pass  # the gateway is starting
                await asyncio.sleep(0.01)

    def is_out(self) -> bool:
        """Whether the ledger has the group out of rotation."""
        ledger = self.server.ledger
        return not ledger.groups[0].in_rotation

    def place_request(self, rank: int = 0) -> Reservation:
        """Reserve a rank as a pick does."""
        ledger = self.server.ledger
        facts = RequestFacts(CallKind.CHAT, "r", prompt_tokens=10)
        return ledger.reserve(ledger.accounts[rank].rank, facts, time.monotonic())


@pytest.fixture
async def scene(unused_tcp_port_factory: Callable[[], int]) -> AsyncIterator[Scene]:
    """A group in rotation; a hang shows after half a second."""
    async with running(unused_tcp_port_factory) as scene:
        yield scene


@asynccontextmanager
async def running(free_port: Callable[[], int]) -> AsyncIterator[Scene]:
    """The gateway from start to stop."""
    async with (
        StandInRank(engine=0) as first,
        StandInRank(engine=1) as second,
        aiohttp.ClientSession() as http,
    ):
        first.engine_steps = second.engine_steps = 0
        endpoints = [first.endpoint, second.endpoint]
        config = Config.model_validate(
            {
                "groups": [{"name": "g0", "engine": "adopted", "model": "m", "endpoints": endpoints}],
                "gateway": {
                    "admin_port": free_port(),
                    "ext_proc_listen": f"127.0.0.1:{free_port()}",
                    "reports": {"interval_s": 0.02},
                },
                "supervision": {"health_interval_s": 0.05, "health_timeout_s": 0.3, "hang_after_s": 0.5},
            }
        )
        scene = Scene(config, http, [first, second])
        stop = asyncio.Event()
        serving = asyncio.create_task(scene.server.serve(stop))
        try:
            await scene.until(lambda group: group["in_rotation"])
            yield scene
        finally:
            stop.set()
            await serving


async def test_one_rank_without_engine_takes_the_group_out_and_it_comes_back_warm(scene: Scene) -> None:
    scene.ranks[1].health_status = 503
    state = await scene.until(lambda group: not group["in_rotation"])
    assert state["trouble"]["verdict"] == "dead"
    assert state["held_out_by"] == {"gateway": "rank g0/1: /health answers 503"}
    assert scene.is_out()
    assert [rank.completions_asked for rank in scene.ranks] == [0, 0]
    scene.ranks[1].health_status = 200
    await scene.until(lambda group: group["in_rotation"])
    assert not scene.is_out()
    assert [rank.completions_asked for rank in scene.ranks] == [1, 1]


async def test_a_group_that_is_healthy_again_waits_for_the_answer_of_its_last_rank(scene: Scene) -> None:
    scene.ranks[0].completion = None
    scene.ranks[1].health_status = 503
    await scene.until(lambda group: not group["in_rotation"])
    scene.ranks[1].health_status = 200
    await scene.until(lambda _group: scene.ranks[0].completions_asked == 1)
    assert scene.is_out()
    scene.ranks[0].completion = {"choices": []}
    await scene.until(lambda group: group["in_rotation"])


async def test_a_rank_that_aborts_the_first_request_is_not_ready(scene: Scene) -> None:
    scene.ranks[0].completion = {"choices": [{"finish_reason": "abort"}]}
    scene.ranks[1].health_status = 503
    await scene.until(lambda group: not group["in_rotation"])
    scene.ranks[1].health_status = 200
    await scene.until(lambda _group: scene.ranks[0].completions_asked == 2)
    assert scene.is_out()


async def test_a_rank_with_requests_and_without_steps_takes_the_group_out(scene: Scene) -> None:
    scene.ranks[0].completion = None
    scene.ranks[0].running = 1
    state = await scene.until(lambda group: not group["in_rotation"])
    assert state["trouble"]["verdict"] == "hung"
    assert state["trouble"]["rank"] == "g0/0"
    scene.ranks[0].running, scene.ranks[0].engine_steps = 0, 1
    scene.ranks[0].completion = {}
    await scene.until(lambda group: group["in_rotation"])


@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_request_that_starts_slowly_leaves_a_group_that_answers_in(
    scene: Scene, waiting: int
) -> None:
    """For several times as long as a rank that runs something may stand still."""
    scene.place_request(1)
    scene.ranks[1].waiting = waiting
    end_s = time.monotonic() + 2.0
    while time.monotonic() < end_s:
        assert not scene.is_out()
        await asyncio.sleep(0.02)
    assert scene.ranks[0].completions_asked == 0
    # Once an answer has come, only what is told or placed after it can raise a doubt again.
    asked = scene.ranks[1].completions_asked
    assert asked == 1 if waiting == 0 else 1 < asked < 10


async def test_an_engine_that_never_wakes_is_found_however_many_requests_come_and_go(scene: Scene) -> None:
    scene.ranks[0].completion = None

    async def come_and_go() -> None:
        while True:
            reservation = scene.place_request()
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(
                1.0, lambda one=reservation: one.release(Outcome.ENDED, time.monotonic())
            )

    coming = asyncio.create_task(come_and_go())
    state = await scene.until(lambda group: not group["in_rotation"])
    coming.cancel()
    assert state["trouble"]["verdict"] == "hung"
    assert "was not answered" in state["trouble"]["reason"]


async def test_a_doubted_rank_that_fails_to_answer_is_out_at_once(scene: Scene) -> None:
    scene.ranks[0].completion_status = 500
    scene.place_request()
    state = await scene.until(lambda group: not group["in_rotation"])
    assert state["trouble"]["reason"] == "rank g0/0: a request was answered 500"
    scene.ranks[0].completion_status = 200
    await scene.until(lambda group: group["in_rotation"])


async def test_a_request_that_an_idle_engine_ignores_takes_the_group_out(scene: Scene) -> None:
    scene.ranks[0].completion = None
    reservation = scene.place_request()
    await scene.until(lambda group: not group["in_rotation"])
    assert (await scene.group())["reservations"] == 1
    scene.ranks[0].completion = {}
    await scene.until(lambda group: group["trouble"] is None or group["trouble"]["for_s"] < 0.5)
    assert reservation.outcome is None


async def test_a_rank_that_fails_clients_and_us_takes_the_group_out(scene: Scene) -> None:
    scene.ranks[1].completion_status = 500
    await scene.tell_failed_answer(1)
    state = await scene.until(lambda group: not group["in_rotation"])
    assert state["trouble"]["reason"] == "rank g0/1: a request was answered 500"
    scene.ranks[1].completion_status = 200
    await scene.until(lambda group: group["in_rotation"])


async def test_an_error_that_is_not_the_ranks_fault_costs_one_small_request(scene: Scene) -> None:
    for _ in range(20):
        await scene.tell_failed_answer(1)
    await scene.until(lambda _group: scene.ranks[1].completions_asked > 0)
    await asyncio.sleep(0.5)
    assert not scene.is_out()
    assert scene.ranks[0].completions_asked == 0
    assert scene.ranks[1].completions_asked <= 4


async def test_a_rank_that_is_full_is_not_taken_for_broken(scene: Scene) -> None:
    scene.ranks[1].completion_status = 503
    await scene.tell_failed_answer(1)
    await scene.until(lambda _group: scene.ranks[1].completions_asked > 0)
    await asyncio.sleep(0.3)
    assert not scene.is_out()


async def test_a_rank_that_makes_steps_stays_in(scene: Scene) -> None:
    scene.ranks[0].running = 1
    scene.place_request()
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:
        scene.ranks[0].engine_steps = (scene.ranks[0].engine_steps or 0) + 1
        assert not scene.is_out()
        await asyncio.sleep(0.05)


async def test_an_operator_takes_a_group_out_and_brings_it_back(scene: Scene) -> None:
    status, _ = await scene.put({"in_rotation": False, "reason": "maintenance"})
    assert status == 200
    assert (await scene.group())["held_out_by"] == {"operator": "maintenance"}
    assert scene.is_out()
    await scene.put({"in_rotation": True})
    assert not scene.is_out()


async def test_what_an_operator_has_taken_out_nobody_else_brings_back(scene: Scene) -> None:
    await scene.put({"in_rotation": False})
    await scene.put({"in_rotation": False, "by": "supervisor of node 0", "reason": "restarting"})
    await scene.put({"in_rotation": True, "by": "supervisor of node 0"})
    assert scene.is_out()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "missing required field `in_rotation`"),
        ({"in_rotation": "no"}, "Expected `bool`"),
        ({"in_rotation": False, "why": ""}, "unknown field `why`"),
        ({"in_rotation": False, "by": ""}, "length >= 1"),
        ({"in_rotation": False, "reason": "x" * 1000}, "length <= 500"),
    ],
)
async def test_a_body_that_is_no_order_is_explained(scene: Scene, body: Any, said: str) -> None:
    status, text = await scene.put(body)
    assert status == 400
    assert said in text
    assert not scene.is_out()


async def test_a_group_that_does_not_exist_is_not_found(scene: Scene) -> None:
    assert (await scene.put({"in_rotation": False}, group="g9"))[0] == 404
