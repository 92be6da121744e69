"""What happens at the limits that envoy/README.md lists, and what goes wrong where a field is another.

Some tests show faults of Envoy 1.40 that the reference warns of. If one of these fails with a newer
Envoy, the fault is gone, and the warning can go too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import pytest
from aiohttp import web

from gateway.envoy_modes import EnvoyMode
from tests.builders_envoy import RunningEnvoy
from tests.builders_mode_setup import CHAT, Setup, stream_slowly
from tests.builders_modes import (
    MODES,
    Change,
    Mode,
    accept_trailers,
    cluster,
    connection_manager,
    http_filter,
    route,
)
from tests.builders_parts import always, ok, picks
from tests.e2e.conftest import StartMode, StartPool, StubPool

MIB = 1 << 20
BUFFER = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer"
FULL_DUPLEX = [mode for mode in EnvoyMode if MODES[mode].is_full_duplex]


def body(size: int) -> bytes:
    """A request of a little more than so many bytes."""
    return b'{"model":"m","messages":["' + b"x" * size + b'"]}'


async def take_long(_request: web.Request) -> web.StreamResponse:
    """An answer after a while."""
    await asyncio.sleep(3)
    return web.Response()


async def logged(envoy: RunningEnvoy) -> tuple[int, str, str]:
    """Status, flags and details of the only request."""
    (line,) = await envoy.access_log(1)
    return line["status"], line["flags"], line["details"]


async def ranks_of(pool: StubPool, requests: int) -> list[str]:
    """The ranks that served so many requests."""
    return [(await pool.post()).headers["x-wavegate-rank"] for _ in range(requests)]


async def answered_raw(envoy: RunningEnvoy, sent: bytes) -> bytes:
    """The first line of the answer to bytes as they are."""
    host, _, port = envoy.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.readline(), 10)
    finally:
        writer.close()


class TestBodies:
    """Which bodies pass, and which can be retried."""

    @pytest.mark.parametrize(
        ("mode", "largest", "beyond"),
        [
            ("one_message", 15 * MIB, 413),
            ("header_only", 15 * MIB, 503),
            ("partial_body", 60_000, 503),
            ("endpoint_picker", 15 * MIB, 413),
            ("endpoint_picker_requests", 15 * MIB, 413),
        ],
    )
    async def test_bodies_are_retried_up_to_a_size(
        self, start_mode: StartMode, mode: str, largest: int, beyond: int
    ) -> None:
        too_large = 100_000 if mode == "partial_body" else 17 * MIB
        async with start_mode(MODES[mode], always(503), ok) as setup:
            assert (await setup.post(body(largest))).status_code == 200
            assert setup.ranks[1].received[-1].body == body(largest)
            assert (await setup.post(body(too_large))).status_code == beyond
            assert len(setup.ranks[1].received) == 1
            abandoned = await setup.envoy.stat("cluster.ranks.retry_or_shadow_abandoned")
            assert abandoned == (1 if beyond == 503 else 0)

    async def test_of_a_long_body_the_partial_mode_sends_twice_its_limit(self, start_mode: StartMode) -> None:
        async with start_mode(MODES["partial_body"], ok, partial_body_bytes=20_000) as setup:
            await setup.post(body(2_000_000))
            sent = await setup.envoy.stat("cluster.ext_proc.upstream_cx_tx_bytes_total")
            assert 20_000 < sent < 60_000
            assert setup.ranks[0].received[-1].body == body(2_000_000)

    async def test_a_body_above_the_gateways_own_limit_is_not_picked_for(self, start_mode: StartMode) -> None:
        async with start_mode(
            MODES["one_message"], ok, max_body_bytes=64 * MIB, protocol={"max_body_bytes": 2 * MIB}
        ) as setup:
            assert (await setup.post(body(4 * MIB))).status_code == 200
            assert setup.chooser.facts == []

    async def test_a_body_without_a_limit_at_the_route_has_the_connections(
        self, start_mode: StartMode
    ) -> None:
        def change(rendered: Any) -> None:
            del route(rendered)["request_body_buffer_limit"]
            del connection_manager(rendered)["http_filters"][1]

        async with start_mode(Mode(EnvoyMode.ONE_MESSAGE, change), ok) as setup:
            assert (await setup.post(body(900_000))).status_code == 200
            assert (await setup.post(body(1_200_000))).status_code == 413

    @pytest.mark.parametrize(
        ("mode", "has_length"), [("one_message", True), ("header_only", True), ("partial_body", False)]
    )
    async def test_the_length_is_known_to_the_rank_unless_bodies_are_streamed(
        self, start_mode: StartMode, mode: str, has_length: bool
    ) -> None:
        async with start_mode(MODES[mode], ok) as setup:
            await setup.post(body(10))
            assert ("content-length" in setup.ranks[0].received[-1].headers) == has_length


class TestTimeouts:
    """Those that are rendered, and those that are switched off."""

    async def test_a_client_that_sends_too_slowly_is_told_so(self, start_pool: StartPool) -> None:
        async with start_pool(ok, change=with_manager(request_timeout="1s")) as pool:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nabc".encode()
            assert b" 408 " in await answered_raw(pool.envoy, head)
            assert await logged(pool.envoy) == (408, "-", "request_overall_timeout")

    async def test_time_in_the_gateway_is_not_time_to_send(self, start_pool: StartPool) -> None:
        async with start_pool(ok, change=with_manager(request_timeout="1s")) as pool:
            pool.picker.delay_s = 2.0
            assert (await pool.post()).status_code == 200

    async def test_a_silent_stream_would_be_ended(self, start_pool: StartPool) -> None:
        async with start_pool(take_long, change=with_manager(stream_idle_timeout="1s")) as pool:
            assert (await pool.post()).status_code == 504
            assert await logged(pool.envoy) == (504, "SI", "stream_idle_timeout")

    async def test_a_long_answer_would_be_ended(self, start_pool: StartPool) -> None:
        def change(rendered: Any) -> None:
            route(rendered)["route"]["timeout"] = "1s"

        async with start_pool(take_long, change=change) as pool:
            answer = await pool.post()
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "no_rank_available")
            assert await logged(pool.envoy) == (504, "UT", "response_timeout")

    @pytest.mark.parametrize("mode", EnvoyMode)
    async def test_a_decision_that_takes_too_long_is_waited_for_in_full_duplex_alone(
        self, start_mode: StartMode, mode: EnvoyMode
    ) -> None:
        async with start_mode(MODES[mode], ok, message_timeout_s=0.4) as setup:
            setup.chooser.hold_s = 3.0
            started_s = time.monotonic()
            assert (await setup.post()).status_code == 200
            assert (time.monotonic() - started_s >= 3.0) == (mode in FULL_DUPLEX)
            timeouts = await setup.envoy.stat("http.openai.ext_proc.message_timeouts")
            assert timeouts == (0 if mode in FULL_DUPLEX else 1)


def with_manager(**fields: str) -> Change:
    """Fields of the connection manager that are not as rendered."""
    return lambda rendered: connection_manager(rendered).update(fields)


class TestPicksThatAreNotFollowed:
    """Requests succeed all the same, and only the balance suffers."""

    async def test_without_the_buffer_filter(self, start_pool: StartPool) -> None:
        def change(rendered: Any) -> None:
            del connection_manager(rendered)["http_filters"][1]

        await self.is_ignored(start_pool, change, is_logged=True)

    async def test_with_the_buffer_filter_first(self, start_pool: StartPool) -> None:
        def change(rendered: Any) -> None:
            connection_manager(rendered)["http_filters"][:2] = reversed(
                connection_manager(rendered)["http_filters"][:2]
            )

        await self.is_ignored(start_pool, change, is_logged=True)

    async def test_where_envoy_may_not_take_the_metadata(self, start_pool: StartPool) -> None:
        def change(rendered: Any) -> None:
            options = http_filter(rendered, "ext_proc")["metadata_options"]
            options["receiving_namespaces"]["untyped"] = ["wavegate"]

        await self.is_ignored(start_pool, change, is_logged=False)

    async def is_ignored(self, start_pool: StartPool, change: Change, *, is_logged: bool) -> None:
        """Every request is picked for, and served by either rank."""
        async with start_pool(ok, ok, change=change) as pool:
            pool.picker.reply = picks(pool.ranks[1].endpoint)
            assert set(await ranks_of(pool, 40)) == {"g0/0", "g0/1"}
            assert len(pool.picker.messages) == 40
            picked = {line["picked"] for line in await pool.envoy.access_log(40)}
            assert picked == {pool.ranks[1].endpoint if is_logged else None}


class TestHealthyRanks:
    """What Envoy's own balancing takes for healthy."""

    async def test_without_a_panic_threshold_nobody_is_served_when_no_rank_is_healthy(
        self, start_pool: StartPool
    ) -> None:
        def change(rendered: Any) -> None:
            cluster(rendered, "ranks")["common_lb_config"]["healthy_panic_threshold"]["value"] = 0

        health_check = {"interval_s": 0.1}
        async with start_pool(ok, with_picker=False, change=change, health_check=health_check) as pool:
            (rank,) = pool.ranks
            rank.is_healthy = False
            await becomes(pool, healthy=0)
            assert (await pool.post()).status_code == 503
            assert await logged(pool.envoy) == (503, "UH", "no_healthy_upstream")

    @pytest.mark.parametrize(("dead", "all_are_tried"), [(80, False), (150, True)])
    async def test_less_than_one_in_a_hundred_is_none(
        self, start_pool: StartPool, dead: int, all_are_tried: bool
    ) -> None:
        health_check = {"interval_s": 0.2, "unhealthy_threshold": 1}
        async with start_pool(
            ok, *[None] * dead, with_picker=False, retries=0, health_check=health_check
        ) as pool:
            await becomes(pool, healthy=1)
            statuses = [(await pool.post()).status_code for _ in range(20)]
            assert (503 in statuses) == all_are_tried
            assert await pool.envoy.stat("cluster.ranks.lb_healthy_panic") == (20 if all_are_tried else 0)

    async def test_a_bad_status_counts_at_once(self, start_pool: StartPool) -> None:
        health_check = {"interval_s": 0.2, "unhealthy_threshold": 100}
        async with start_pool(ok, health_check=health_check) as pool:
            pool.ranks[0].is_healthy = False
            await becomes(pool, healthy=0)


async def becomes(pool: StubPool, *, healthy: int) -> None:
    """Wait until Envoy takes so many ranks for healthy."""
    async with asyncio.timeout(15):
        while sum((await pool.envoy.healthy_ranks()).values()) != healthy:
            await asyncio.sleep(0.1)


class TestBreakerOfTheGateway:
    """More requests at once than it lets pass are balanced by Envoy."""

    @pytest.mark.parametrize("mode", EnvoyMode)
    async def test_further_requests_are_served_without_a_pick(
        self, start_mode: StartMode, mode: EnvoyMode
    ) -> None:
        def change(rendered: Any) -> None:
            cluster(rendered, "ext_proc")["circuit_breakers"]["thresholds"][0]["max_requests"] = 1

        async with start_mode(Mode(mode, change), stream_slowly) as setup:
            # Streams beyond the limit that wait for the first connection end too late for full duplex.
            await setup.post()
            answers = await asyncio.gather(*(setup.post() for _ in range(3)))
            assert {answer.status_code for answer in answers} == {200}
            assert len(setup.chooser.facts) == 2


class TestStreamsThatEndEarly:
    """Headers sent, no response phase asked for."""

    async def while_under_way(self, setup: Setup) -> tuple[int, int]:
        """Reservations, and how many of them are unobserved, in the middle of a response."""
        async with setup.client() as http, http.stream("POST", CHAT, content=body(10)) as answer:
            await anext(answer.aiter_raw())
            await asyncio.sleep(0.3)
            (account,) = setup.chooser.ledger.accounts
            return account.reservations, len(account.unobserved)

    async def test_with_a_promise_that_is_not_kept_the_rank_is_free_too_early(
        self, start_mode: StartMode
    ) -> None:
        def change(rendered: Any) -> None:
            http_filter(rendered, "ext_proc")["processing_mode"]["response_trailer_mode"] = "SKIP"

        async with start_mode(Mode(EnvoyMode.HEADER_ONLY, change), stream_slowly) as setup:
            assert await self.while_under_way(setup) == (0, 0)

    async def test_without_a_promise_the_reservation_becomes_unobserved(self, start_mode: StartMode) -> None:
        def change(rendered: Any) -> None:
            http_filter(rendered, "ext_proc")["processing_mode"]["response_trailer_mode"] = "SKIP"
            del http_filter(rendered, "ext_proc")["grpc_service"]["initial_metadata"]

        async with start_mode(Mode(EnvoyMode.HEADER_ONLY, change), stream_slowly) as setup:
            assert await self.while_under_way(setup) == (1, 1)


class TestFaultsOfEnvoy:
    """Why some fields are as they are."""

    @pytest.mark.parametrize(("retries", "times"), [(True, 2), (False, 1)])
    async def test_a_full_duplex_body_with_trailers_arrives_twice_if_it_may_be_retried(
        self, start_mode: StartMode, retries: bool, times: int
    ) -> None:
        """envoyproxy/envoy#45470."""

        def change(rendered: Any) -> None:
            policy = route(rendered)["route"]["retry_policy"]
            accept_trailers(rendered)
            if retries:
                route(rendered)["route"]["retry_policy"] = policy

        async with start_mode(Mode(EnvoyMode.ENDPOINT_PICKER, change), ok) as setup:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n"
            sent = head.encode() + b"%x\r\n%b\r\n0\r\nx-t: 1\r\n\r\n" % (len(body(10)), body(10))
            assert b" 200 " in await answered_raw(setup.envoy, sent)
            assert setup.ranks[0].received[-1].body == body(10) * times

    async def test_a_buffer_filter_after_a_partial_body_waits_for_ever(self, start_mode: StartMode) -> None:
        def change(rendered: Any) -> None:
            buffer = {"@type": BUFFER, "max_request_bytes": 16 * MIB}
            connection_manager(rendered)["http_filters"].insert(
                1, {"name": "envoy.filters.http.buffer", "typed_config": buffer}
            )

        async with start_mode(Mode(EnvoyMode.PARTIAL_BODY, change), ok) as setup:
            assert (await setup.post(body(60_000))).status_code == 200
            async with setup.client() as http:
                with pytest.raises(httpx2.ReadTimeout):
                    await http.post(CHAT, content=body(MIB), timeout=3)

    @pytest.mark.parametrize("mode", FULL_DUPLEX)
    async def test_a_held_full_duplex_request_fails_with_the_gateway(
        self, start_mode: StartMode, mode: EnvoyMode
    ) -> None:
        async with start_mode(MODES[mode], ok) as setup:
            setup.chooser.hold_s = 5.0
            request = asyncio.create_task(setup.post())
            async with asyncio.timeout(10):
                while not setup.chooser.facts:
                    await asyncio.sleep(0.01)
            await setup.stop_service()
            assert (await request).status_code == 500
            assert setup.ranks[0].received == []
            assert (await logged(setup.envoy))[2].startswith("ext_proc_error_gRPC_error")


class TestClients:
    """What clients do besides sending bodies in one piece."""

    async def test_one_that_waits_to_be_asked_for_its_body_is_asked(self, start_pool: StartPool) -> None:
        async with start_pool(ok) as pool:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
            assert b" 100 " in await answered_raw(pool.envoy, head.encode())

    async def test_ranks_get_the_clients_address_and_the_number_of_the_attempt_and_nothing_that_steers_envoy(
        self, start_pool: StartPool
    ) -> None:
        async with start_pool(ok) as pool:
            forged = {"x-envoy-attempt-count": "7", "x-envoy-max-retries": "3"}
            await pool.post(headers={**forged, "x-envoy-upstream-rq-timeout-ms": "1"})
            (received,) = pool.ranks[0].received
            assert {
                name: value for name, value in received.headers.items() if name.startswith("x-envoy")
            } == {
                "x-envoy-external-address": "127.0.0.1",
                "x-envoy-attempt-count": "1",
            }
