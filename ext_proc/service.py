"""The gRPC service `envoy.service.ext_proc.v3.ExternalProcessor` and standard gRPC health, on grpc.aio.

Owns sockets and streams; decides nothing. Messages are parsed here from raw bytes, which was the cheapest way
of serving them (less than half the CPU of the synchronous server).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias
from uuid import uuid4

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.message import DecodeError

from ext_proc.body_modes import UnsupportedModeError
from ext_proc.decision import Decider, Held, Placed, Refused
from ext_proc.exchange import Exchange
from ext_proc.health import SERVICE_NAME, Health
from ext_proc.protocol import CollectedBodies, ProtocolSettings
from ext_proc.protocol_names import STREAM_END_METADATA
from ext_proc.reservation import Outcome
from ext_proc.usage import Usage
from ext_proc.vocabulary import Rank

MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room for attributes and metadata beside the largest body in one gRPC message."""

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class StreamObserver(Protocol):
    """Told what happens on streams, for telemetry."""

    def on_placed(self, placed: Placed, duration_s: float) -> None:
        """A request was placed, so long after its last message had arrived."""
        ...

    def on_refused(self, refused: Refused) -> None:
        """A request was answered by the gateway itself."""
        ...

    def on_response(self, rank: Rank, status: int | None, usage: Usage | None) -> None:
        """A response passed by, or as much of it as there was."""
        ...


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for TLS on the ext_proc listener."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """If given, gateways must show a certificate that it has signed."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and for how many the service runs."""

    listen: str
    """`ip:port` (port 0: any free one) or `unix:/path`."""
    max_streams: int = 65_536
    """Streams at once, each a request under way; further ones are refused with RESOURCE_EXHAUSTED."""
    tls: TlsFiles | None = None
    keepalive_s: float = 15.0
    """How often a connection is probed, and how long an answer may take: the streams of a machine that has
    vanished would otherwise stay open, and their ranks reserved, until TCP gives up."""


class ExtProcServer:
    """Serves ext_proc streams until stopped."""

    def __init__(
        self,
        decider: Decider,
        settings: ServerSettings,
        protocol: ProtocolSettings,
        observer: StreamObserver,
    ) -> None:
        """Prepare to serve; nothing listens yet."""
        self._decider = decider
        self._settings = settings
        self._protocol = protocol
        self._observer = observer
        self._collected = CollectedBodies(protocol.max_collected_bytes)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._open_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._health = Health()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", protocol.max_body_bytes + MESSAGE_OVERHEAD_BYTES),
                ("grpc.max_concurrent_streams", 2**31 - 1),
                ("grpc.keepalive_time_ms", round(settings.keepalive_s * 1000)),
                ("grpc.keepalive_timeout_ms", round(settings.keepalive_s * 1000)),
                ("grpc.http2.ping_timeout_ms", round(settings.keepalive_s * 1000)),
                ("grpc.http2.max_pings_without_data", 0),
                # Two gateways must not share a port by accident and split the ledger.
                ("grpc.so_reuseport", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": handler}),)
        )
        self._health.add_to(self._server)

    def serve_also(self, handler: grpc.GenericRpcHandler) -> None:
        """Serve another gRPC service on the same port; to be called before `start`."""
        self._server.add_generic_rpc_handlers((handler,))

    async def start(self) -> int:
        """Listen. Returns the port (1 for a unix socket).

        Raises:
            OSError: the address is taken, or a TLS file cannot be read; the message names it.
        """
        listen, tls = self._settings.listen, self._settings.tls
        try:
            port: int = (
                self._server.add_secure_port(listen, _credentials(tls))
                if tls is not None
                else self._server.add_insecure_port(listen)
            )
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error
        if listen.startswith("unix:"):
            _only_for_owner(Path(listen.removeprefix("unix:")))
        await self._health.start()
        await self._server.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        """Announce through gRPC health whether Envoy should send streams here."""
        await self._health.set_ready(ready)

    def wake(self, held: Held) -> None:
        """Let the stream of a held request go on: it has been decided. Called by whoever decides."""
        waiting = self._waiting.get(id(held))
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def drain(self, timeout_s: float) -> int:
        """Wait until the open streams have ended. Returns how many were still open at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._open_streams

    async def stop(self) -> None:
        """Cut what is still open and stop listening."""
        await self._server.stop(grace=None)

    async def _process(self, _requests: object, context: _Context) -> None:
        if self._open_streams >= self._settings.max_streams:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams")
        exchange = Exchange(self._decider, self._protocol, self._collected, _new_request_id)
        outcome = Outcome.FAILED
        self._open_streams += 1
        self._idle.clear()
        try:
            await self._converse(exchange, context)
            outcome = Outcome.ENDED
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            # Swallowing the cancellation leaks memory in the native library (grpc/grpc#43360).
            raise
        except UnsupportedModeError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        finally:
            self._end(exchange, outcome, context)

    async def _converse(self, exchange: Exchange, context: _Context) -> None:
        """Reply to messages until the gateway ends the stream, or the exchange needs no more of it."""
        reading: asyncio.Task[object] | None = None
        try:
            while not exchange.is_over:
                data = await (context.read() if reading is None else reading)
                reading = None
                if data is grpc.aio.EOF:
                    return
                assert isinstance(data, bytes)
                started_s = time.perf_counter()
                was_undecided = exchange.decided is None
                replies = _replies(exchange, data)
                # Or the body would stay in memory until the next message, which may be the last.
                del data
                took_s = time.perf_counter() - started_s
                if was_undecided and exchange.decided is not None:
                    self._observe_decision(exchange.decided, took_s)
                for reply in replies:
                    await context.write(reply)
                if exchange.held is not None:
                    # Reading goes on meanwhile: only so is it seen that the client has gone.
                    reading = asyncio.ensure_future(context.read())
                    await self._wait_for_decision(exchange, context, reading, took_s)
        finally:
            if reading is not None:
                reading.cancel()

    async def _wait_for_decision(
        self, exchange: Exchange, context: _Context, reading: asyncio.Task[object], took_s: float
    ) -> None:
        """Send the replies to a held request once it is decided; return sooner if there is more to read.

        `took_s`: how long it took to read the request and to hold it.
        """
        held = exchange.held
        assert held is not None
        decided = self._waiting[id(held)] = asyncio.get_running_loop().create_future()
        try:
            if held.decision is None:
                await asyncio.wait((decided, reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[id(held)]
        if held.decision is not None:
            started_s = time.perf_counter()
            replies = exchange.on_decision()
            if exchange.decided is not None:
                self._observe_decision(exchange.decided, took_s + time.perf_counter() - started_s)
            for reply in replies:
                await context.write(reply)

    def _observe_decision(self, decision: Placed | Refused, duration_s: float) -> None:
        if isinstance(decision, Placed):
            self._observer.on_placed(decision, duration_s)
        else:
            self._observer.on_refused(decision)

    def _end(self, exchange: Exchange, outcome: Outcome, context: _Context) -> None:
        promised = exchange.may_outlive_stream and STREAM_END_METADATA in (
            context.invocation_metadata() or ()
        )
        self._open_streams -= 1
        if self._open_streams == 0:
            self._idle.set()
        exchange.end(outcome, time.monotonic(), ends_with_response=promised)
        if exchange.response is not None and isinstance(exchange.decided, Placed):
            rank = exchange.decided.reservation.rank
            self._observer.on_response(rank, exchange.response.status, exchange.response.usage)


def _replies(exchange: Exchange, data: bytes) -> Iterable[bytes]:
    try:
        message = ProcessingRequest.FromString(data)
    except DecodeError:
        return exchange.on_unreadable_message()
    return exchange.on_message(message, time.monotonic())


def _new_request_id() -> str:
    return str(uuid4())


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    client_ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def _only_for_owner(socket: Path) -> None:
    socket.chmod(0o600)
