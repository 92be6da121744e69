"""The ext_proc service over real gRPC, in one-message mode: a body in, a pick out, a reservation as long as
the stream."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Self

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ext_proc.decision import Decision, DropReason
from ext_proc.health import LIVENESS, READINESS, SERVICE_NAME
from ext_proc.vocabulary import RequestFacts
from tests.builders import balancer, group, pool
from tests.hermetic.conftest import ExtProcClient, Serve, chat, whole_body

RANKS = group("g0", 4)


def routed_to(*endpoints: str) -> ProcessingResponse:
    """The reply that names `endpoints`, in order."""
    reply = ProcessingResponse(request_body=BodyResponse())
    reply.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": ",".join(endpoints)}})
    return reply


class Wire:
    """A TCP connection to a server that can be cut without either end being told."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._server: asyncio.Server | None = None
        self.is_cut = False
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if not self.is_cut:
                writer.write(data)
        writer.close()


async def eventually(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Return as soon as `condition` holds; fail if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_is_routed_to_an_ordered_list_of_ranks(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        stream = served.client.open()
        reply = await served.client.exchange(stream, whole_body(chat()))
        assert reply == routed_to(*(rank.endpoint for rank in RANKS[:3]))
        assert [pick.first for pick in served.observed.picks] == [RANKS[0]]


async def test_the_reservation_lives_as_long_as_the_stream(serve_ext_proc: Serve) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger)) as served:
        stream = served.client.open()
        await served.client.exchange(stream, whole_body(chat()))
        assert ledger.accounts[0].reservations == 1
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await eventually(lambda: ledger.accounts[0].reservations == 0)


async def test_a_cancelled_stream_frees_its_reservation(serve_ext_proc: Serve) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger)) as served:
        stream = served.client.open()
        await served.client.exchange(stream, whole_body(chat()))
        stream.cancel()
        await eventually(lambda: ledger.accounts[0].reservations == 0)


async def test_a_lost_connection_frees_its_reservations(serve_ext_proc: Serve) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger)) as served:
        for _ in range(8):
            await served.client.exchange(served.client.open(), whole_body(chat()))
        assert sum(account.reservations for account in ledger.accounts) == 8
        await served.client.channel.close()
        await eventually(lambda: all(account.reservations == 0 for account in ledger.accounts))


async def test_a_machine_that_vanishes_frees_its_reservations(serve_ext_proc: Serve) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger), keepalive_s=0.3) as served, Wire(served.port) as wire:
        client = ExtProcClient(f"127.0.0.1:{wire.port}")
        await client.exchange(client.open(), whole_body(chat()))
        await asyncio.sleep(1.0)
        assert ledger.accounts[0].reservations == 1, "a quiet stream is no dead one"
        wire.is_cut = True
        await eventually(lambda: ledger.accounts[0].reservations == 0)
        await client.channel.close()


async def test_concurrent_streams_spread_evenly(serve_ext_proc: Serve) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger)) as served:
        streams = [served.client.open() for _ in range(64)]
        await asyncio.gather(*(served.client.exchange(stream, whole_body(chat())) for stream in streams))
        assert [account.reservations for account in ledger.accounts] == [16, 16, 16, 16]


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff\x00", b"[1, 2"])
async def test_a_malformed_body_is_still_balanced(serve_ext_proc: Serve, body: bytes) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        reply = await served.client.exchange(served.client.open(), whole_body(body, path="/unknown"))
        assert reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (ProcessingRequest(request_trailers=HttpTrailers()), "request_trailers"),
        (ProcessingRequest(response_headers=HttpHeaders()), "response_headers"),
        (ProcessingRequest(response_body=HttpBody(end_of_stream=True)), "response_body"),
        (ProcessingRequest(response_trailers=HttpTrailers()), "response_trailers"),
    ],
)
async def test_a_message_without_a_request_body_passes_without_a_pick(
    serve_ext_proc: Serve, message: ProcessingRequest, kind: str
) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        reply = await served.client.exchange(served.client.open(), message)
        assert reply.WhichOneof("response") == kind
        assert served.observed.picks == []


async def test_a_second_whole_body_on_one_stream_takes_no_second_reservation(serve_ext_proc: Serve) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger)) as served:
        stream = served.client.open()
        await served.client.exchange(stream, whole_body(chat()))
        second = await served.client.exchange(stream, whole_body(chat()))
        assert second == ProcessingResponse(request_body=BodyResponse())
        assert sum(account.reservations for account in ledger.accounts) == 1


async def test_a_message_that_does_not_parse_is_refused_and_no_other_stream_ends(
    serve_ext_proc: Serve,
) -> None:
    ledger = pool(RANKS)
    async with serve_ext_proc(balancer(ledger)) as served:
        kept = served.client.open()
        await served.client.exchange(kept, whole_body(chat()))
        raw = served.client.channel.stream_stream(f"/{SERVICE_NAME}/Process")()
        await raw.write(b"\xff\xff\xff")
        refused = ProcessingResponse.FromString(await raw.read())
        assert refused.immediate_response.status.code == 400
        assert await raw.read() is grpc.aio.EOF
        assert sum(account.reservations for account in ledger.accounts) == 1
        assert [one.reason for one in served.observed.refused] == [DropReason.MALFORMED_HEADER]


async def test_bytes_in_a_header_that_are_no_utf8_are_refused_by_name(serve_ext_proc: Serve) -> None:
    """As Envoy 1.40 sends them: in a string attribute, just as they came."""
    sent = (
        whole_body(chat(), request_id="not-utf-8").SerializeToString().replace(b"not-utf-8", b"not-utf-\xff")
    )
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        raw = served.client.channel.stream_stream(f"/{SERVICE_NAME}/Process")()
        await raw.write(sent)
        refused = ProcessingResponse.FromString(await raw.read())
    assert refused.immediate_response.status.code == 400
    assert b"UTF-8" in refused.immediate_response.body


async def test_a_body_of_the_largest_accepted_size_is_read(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(balancer(pool(RANKS)), max_body_bytes=8 << 20) as served:
        reply = await served.client.exchange(served.client.open(), whole_body(b"x" * (8 << 20)))
        assert reply.WhichOneof("response") == "request_body"


async def test_of_an_answered_body_nothing_is_kept(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        message = whole_body(chat("x" * (1 << 20)))
        tracemalloc.start()
        try:
            streams = [served.client.open() for _ in range(16)]
            for stream in streams:
                await served.client.exchange(stream, message)
            assert tracemalloc.get_traced_memory()[0] < 4 << 20
        finally:
            tracemalloc.stop()


async def test_a_decider_that_fails_ends_its_stream_and_no_other(serve_ext_proc: Serve) -> None:
    class Failing:
        def decide(self, facts: RequestFacts, now_s: float) -> Decision:
            if facts.prompt_chars > 100:
                raise RuntimeError("cannot decide")
            return balancer(pool(RANKS)).decide(facts, now_s)

    async with serve_ext_proc(Failing()) as served:
        kept, failed = served.client.open(), served.client.open()
        await served.client.exchange(kept, whole_body(chat()))
        with pytest.raises(grpc.aio.AioRpcError):
            await served.client.exchange(failed, whole_body(chat("x" * 1000)))
        assert await served.server.drain(timeout_s=0.05) == 1


async def test_a_unix_socket_serves_its_owner_only(serve_ext_proc: Serve, tmp_path: Path) -> None:
    socket = tmp_path / "ext_proc.sock"
    async with serve_ext_proc(balancer(pool(RANKS)), listen=f"unix:{socket}") as served:
        assert socket.stat().st_mode & 0o077 == 0
        await served.client.exchange(served.client.open(), whole_body(chat()))


async def test_health_follows_readiness_under_every_name(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        stub = health_pb2_grpc.HealthStub(served.client.channel)

        async def statuses() -> dict[str, int]:
            names = (LIVENESS, READINESS, SERVICE_NAME, "")
            replies = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            return {name: reply.status for name, reply in zip(names, replies, strict=True)}

        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        others = dict.fromkeys((READINESS, SERVICE_NAME, ""), not_serving)
        assert await statuses() == {LIVENESS: serving, **others}
        await served.server.set_ready(True)
        assert await statuses() == {LIVENESS: serving, **dict.fromkeys(others, serving)}


async def test_draining_waits_for_open_streams_up_to_the_timeout(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as served:
        stream = served.client.open()
        await served.client.exchange(stream, whole_body(chat()))
        assert await served.server.drain(timeout_s=0.05) == 1
        draining = asyncio.create_task(served.server.drain(timeout_s=30))
        await stream.done_writing()
        assert await draining == 0


async def test_a_taken_address_is_refused_by_name(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(balancer(pool(RANKS))) as first:
        taken = f"127.0.0.1:{first.port}"
        with pytest.raises(OSError, match=f"cannot listen on {taken}"):
            async with serve_ext_proc(balancer(pool(RANKS)), listen=taken):
                pass
