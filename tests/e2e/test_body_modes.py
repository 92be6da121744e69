"""Every ext_proc body mode between a real Envoy and the real service: picks, lifetimes, holds, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx2
import pytest
from aiohttp import web

from ext_proc.decision import DropReason, Refused
from ext_proc.usage import Usage
from gateway.envoy_modes import EnvoyMode
from tests.builders_mode_setup import CHAT, DEAD, stream_slowly
from tests.builders_modes import (
    MODES,
    REQUEST_PHASES_ONLY,
    Mode,
    accept_trailers,
    leave_out_upstream_log,
)
from tests.builders_parts import always, ok
from tests.e2e.conftest import StartMode

in_every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@in_every_mode
async def test_the_pick_is_obeyed_and_the_body_arrives_as_it_was_sent(
    start_mode: StartMode, mode: Mode
) -> None:
    async with start_mode(mode, ok, ok, ok) as setup:
        ranks = setup.chooser.choice
        for index in (2, 0, 1):
            setup.chooser.choice = [ranks[index]]
            for size in (0, 10, 300_000, 2_000_000):
                body = b'{"model":  "m", "messages": ["' + b"x" * size + b'"]}'
                answer = await setup.post(body)
                assert (answer.status_code, answer.headers["x-wavegate-rank"]) == (200, f"g0/{index}")
                assert setup.ranks[index].received[-1].body == body


@in_every_mode
async def test_a_body_that_comes_in_chunks_arrives_whole(start_mode: StartMode, mode: Mode) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"model": "m", "messages": ["'
        for _ in range(5):
            yield b"y" * 50_000
            await asyncio.sleep(0.01)
        yield b'"]}'

    async with start_mode(mode, ok, ok) as setup:
        setup.chooser.choice = setup.chooser.choice[1:]
        assert (await setup.post(chunks())).status_code == 200
        assert len(setup.ranks[1].received[-1].body) == 250_032


@in_every_mode
async def test_a_client_cannot_choose_its_rank(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, ok, ok) as setup:
        setup.chooser.choice = setup.chooser.choice[:1]
        for _ in range(3):
            forged = setup.ranks[1].endpoint
            answer = await setup.post(
                **{"x-gateway-destination-endpoint": forged, "x-data-parallel-rank": "1"}
            )
            assert answer.headers["x-wavegate-rank"] == "g0/0"
        received = setup.ranks[0].received[-1].headers
        # The route removes the header again: ranks have no use for it.
        assert "x-gateway-destination-endpoint" not in received
        assert "x-data-parallel-rank" not in received


@pytest.mark.parametrize(
    "mode",
    [mode for mode in MODES.values() if mode.sees_headers],
    ids=[n for n, m in MODES.items() if m.sees_headers],
)
async def test_a_request_without_a_body_is_picked_for_where_headers_are_sent(
    start_mode: StartMode, mode: Mode
) -> None:
    async with start_mode(mode, ok, stream_slowly) as setup:
        setup.chooser.choice = setup.chooser.choice[1:]
        async with setup.client() as http, http.stream("GET", "/v1/models") as answer:
            assert answer.headers["x-wavegate-rank"] == "g0/1"
            assert setup.chooser.reservations == [0, 1]
            await answer.aread()
        await setup.until_reservations_are([0, 0], within_s=0.5)


@in_every_mode
async def test_a_reservation_lives_as_long_as_the_response(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, stream_slowly) as setup, setup.client() as http:
        async with http.stream("POST", CHAT, content=b'{"model":"m","messages":[]}') as answer:
            under_way = []
            async for line in answer.aiter_lines():
                if line.endswith(('"n":0}', '"n":5}')):
                    under_way += setup.chooser.reservations
        assert under_way == [1, 1]
        await setup.until_reservations_are([0], within_s=0.5)


@in_every_mode
async def test_a_client_that_leaves_frees_its_rank_at_once(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, stream_slowly) as setup:
        async with (
            setup.client() as http,
            http.stream("POST", CHAT, content=b'{"model":"m","messages":[]}') as answer,
        ):
            await anext(answer.aiter_raw())
            assert setup.chooser.reservations == [1]
        await setup.until_reservations_are([0], within_s=0.5)


@in_every_mode
async def test_a_request_held_for_more_than_a_second_is_then_routed(
    start_mode: StartMode, mode: Mode
) -> None:
    async with start_mode(mode, ok, ok) as setup:
        setup.chooser.choice, setup.chooser.hold_s = setup.chooser.choice[1:], 1.3
        started_s = time.monotonic()
        answer = await setup.post(b'{"model":"m","messages":["' + b"x" * 200_000 + b'"]}')
        assert time.monotonic() - started_s >= 1.3
        assert answer.headers["x-wavegate-rank"] == "g0/1"
        assert len(setup.ranks[1].received[-1].body) == 200_029


@in_every_mode
async def test_a_client_that_leaves_while_held_is_withdrawn(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, ok) as setup:
        setup.chooser.hold_s = 1.0
        async with setup.client() as http:
            with pytest.raises(httpx2.ReadTimeout):
                await http.post(CHAT, content=b'{"model":"m","messages":[]}', timeout=0.3)
        await asyncio.sleep(1.0)
        assert setup.ranks[0].received == []
        assert [account.picks for account in setup.chooser.ledger.accounts] == [0]


@in_every_mode
async def test_a_rank_that_refuses_is_passed_over_for_the_next_of_the_pick(
    start_mode: StartMode, mode: Mode
) -> None:
    async with start_mode(mode, ok, ok, DEAD) as setup:
        dead, other = setup.chooser.choice[2], setup.chooser.choice[1]
        for _ in range(3):
            setup.chooser.choice = [dead, other]
            answer = await setup.post()
            assert (answer.status_code, answer.headers["x-wavegate-rank"]) == (200, "g0/1")
        await setup.until_reservations_are([0, 0, 0], within_s=0.5)


@in_every_mode
async def test_a_request_that_was_refused_counts_on_the_rank_that_has_it_before_it_answers(
    start_mode: StartMode, mode: Mode
) -> None:
    may_answer = asyncio.Event()

    async def answer_when_told(request: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return await ok(request)

    body, no_utf_8 = b'{"model":"m","messages":[]}', {b"user-agent": b"caf\xe9"}
    async with start_mode(mode, always(503), answer_when_told, DEAD) as setup, setup.client() as http:
        full, good, dead = setup.chooser.choice
        for refusing in ([full], [dead], [dead, full]):
            setup.chooser.choice = [*refusing, good]
            may_answer.clear()
            asking = asyncio.create_task(http.post(CHAT, content=body, headers=no_utf_8))
            await setup.until_reservations_are([0, 1, 0], within_s=5)
            may_answer.set()
            assert (await asking).headers["x-wavegate-rank"] == "g0/1"
            await setup.until_reservations_are([0, 0, 0], within_s=0.5)


async def test_the_reservation_moves_to_the_rank_that_served_where_only_the_response_tells(
    start_mode: StartMode,
) -> None:
    tells_nothing_else = Mode(EnvoyMode.ENDPOINT_PICKER, leave_out_upstream_log)
    async with start_mode(tells_nothing_else, ok, stream_slowly, DEAD) as setup:
        setup.chooser.choice = [setup.chooser.choice[2], setup.chooser.choice[1]]
        async with (
            setup.client() as http,
            http.stream("POST", CHAT, content=b'{"model":"m","messages":[]}') as answer,
        ):
            await anext(answer.aiter_raw())
            assert setup.chooser.reservations == [0, 1, 0]
        await setup.until_reservations_are([0, 0, 0], within_s=0.5)
        assert setup.chooser.retries == []


@in_every_mode
async def test_the_gateway_hears_of_no_request_that_the_first_rank_takes(
    start_mode: StartMode, mode: Mode
) -> None:
    async with start_mode(mode, ok, DEAD) as setup:
        good, dead = setup.chooser.choice
        setup.chooser.choice = [good]
        for _ in range(3):
            await setup.post(**{"x-envoy-attempt-count": "7"})
        setup.chooser.choice = [dead, good]
        await setup.post()
        async with asyncio.timeout(5):
            while not setup.chooser.retries:
                await asyncio.sleep(0.005)
        assert setup.chooser.retries == [good.endpoint]


@in_every_mode
async def test_a_refusal_reaches_the_client_as_it_was_made(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, ok) as setup:
        setup.chooser.refusal = Refused(429, DropReason.QUEUE_FULL, retry_after_s=2)
        answer = await setup.post()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["x-wavegate-drop-reason"] == "queue_full"
        assert answer.json()["error"]["code"] == "queue_full"
        assert setup.ranks[0].received == []


@in_every_mode
async def test_without_the_service_envoy_balances_by_itself(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, ok, with_service=False) as setup:
        for size in (10, 300_000):
            answer = await setup.post(b'{"model":"m","messages":["' + b"x" * size + b'"]}')
            assert (answer.status_code, answer.headers["x-wavegate-rank"]) == (200, "g0/0")


@pytest.mark.parametrize(
    "mode",
    [m for m in MODES.values() if not m.is_full_duplex],
    ids=[n for n, m in MODES.items() if not m.is_full_duplex],
)
async def test_a_service_that_dies_takes_no_request_with_it(start_mode: StartMode, mode: Mode) -> None:
    async with start_mode(mode, stream_slowly) as setup, setup.client() as http:
        async with http.stream("POST", CHAT, content=b'{"model":"m","messages":[]}') as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == 3:
                    await setup.stop_service()
        assert lines[-2:] == ["data: [DONE]", ""]
        assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "mode",
    [m for m in MODES.values() if m.is_full_duplex],
    ids=[n for n, m in MODES.items() if m.is_full_duplex],
)
async def test_full_duplex_streams_die_with_their_service(start_mode: StartMode, mode: Mode) -> None:
    """Whatever `failure_mode_allow` says: what Envoy has sent away it cannot go on without."""
    async with start_mode(mode, stream_slowly) as setup, setup.client() as http:
        async with http.stream("POST", CHAT, content=b'{"model":"m","messages":[]}') as answer:
            await setup.stop_service()
            with pytest.raises(httpx2.RemoteProtocolError):
                await answer.aread()
        # The next request finds the service gone before anything was sent: it is balanced by Envoy.
        assert (await http.get("/v1/models")).status_code == 200


async def test_a_partial_body_tells_the_facts_of_a_long_prompt(start_mode: StartMode) -> None:
    async with start_mode(MODES["partial_body"], ok) as setup:
        body = (
            b'{"model":"m","stream":true,"messages":[{"role":"user","content":"' + b"abcd" * 500_000 + b'"}]}'
        )
        await setup.post(body)
        assert setup.ranks[0].received[-1].body == body
        (facts,) = setup.chooser.facts
        assert (facts.model, facts.stream) == ("m", True)
        assert facts.prompt_tokens == pytest.approx(500_000, rel=0.01)


async def test_an_endpoint_picker_refuses_a_body_above_its_limit(start_mode: StartMode) -> None:
    async with start_mode(MODES["endpoint_picker"], ok, protocol={"max_body_bytes": 100_000}) as setup:
        answer = await setup.post(b"x" * 100_001)
        assert answer.status_code == 413
        assert setup.ranks[0].received == []


async def test_an_endpoint_picker_counts_tokens_and_keeps_the_clients_name_of_a_model(
    start_mode: StartMode,
) -> None:
    async with start_mode(
        MODES["endpoint_picker"], stream_slowly, protocol={"model_names": {"mine": "target"}}
    ) as setup:
        answer = await setup.post(b'{"model":"mine","messages":[]}')
        assert setup.ranks[0].received[-1].body == b'{"model":"target","messages":[]}'
        assert answer.text.count('"model":"mine"') == 10
        assert "target" not in answer.text
        async with asyncio.timeout(5):
            while not setup.observed.responses:
                await asyncio.sleep(0.005)
        assert setup.observed.responses == [("g0/0", 200, Usage(7, 10))]


async def test_what_a_gateway_hides_is_left_to_the_ranks_reports(start_mode: StartMode) -> None:
    async with start_mode(REQUEST_PHASES_ONLY, stream_slowly) as setup:
        account = setup.chooser.ledger.accounts[0]
        async with (
            setup.client() as http,
            http.stream("POST", CHAT, content=b'{"model":"m","messages":[]}') as answer,
        ):
            async for _ in answer.aiter_raw():
                pass
            async with asyncio.timeout(5):
                while not account.unobserved:
                    await asyncio.sleep(0.005)
        assert (account.reservations, len(account.unobserved)) == (1, 1)


async def test_trailers_of_a_request_pass_the_endpoint_picker(start_mode: StartMode) -> None:
    async with start_mode(Mode(EnvoyMode.ENDPOINT_PICKER, accept_trailers), ok) as setup:
        host, _, port = setup.envoy.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model":"m","messages":[]}'
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n".encode()
        )
        writer.write(head + b"%x\r\n%b\r\n0\r\nx-t: 1\r\n\r\n" % (len(body), body))
        status = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert b" 200 " in status
        assert setup.ranks[0].received[-1].body == body
