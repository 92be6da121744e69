"""How a front end talks to its engines: requests out, outputs in, and the wave protocol's front-end part.

    EngineClient           one engine (vLLM AsyncMPClient)
    DpEngineClient         external mode: always its own engine, knows the wave (vLLM DPAsyncMPClient)
    DpLoadBalancingClient  internal and hybrid mode, in `client_lb` (vLLM DPLBAsyncMPClient)

vLLM 0.32 vllm/v1/engine/core_client.py. Must never look into a request beyond its addressing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import zmq

from vllm_ranks.engine import wire
from vllm_ranks.engine.sockets import Context, Socket, open_socket
from vllm_ranks.engine.waves import EngineCounts, FrontEndWaves, WavePublication

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine behind this server is gone; answered 500, and 503 on /health."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class UtilityError(RuntimeError):
    """A method called in the engine failed."""


class EngineClient:
    """The plain client: one engine, no waves."""

    def __init__(
        self,
        context: Context,
        input_socket: Socket,
        output_socket: Socket,
        managed_ranks: Iterable[int],
        client_index: int = 0,
    ) -> None:
        """Takes over the bound ROUTER and PULL sockets; engines have their addresses."""
        self.engines = tuple(managed_ranks)
        """Global ranks of the engines requests can be sent to."""
        self.engine_dead = False
        self.ready: dict[int, wire.ReadyResponse] = {}
        """What each engine said when its model was loaded."""
        self.waves: FrontEndWaves | None = None
        """What this client believes about its group; `None` without a coordinator."""
        self.client_index = client_index
        self._context = context
        self._input = input_socket
        self._output = output_socket
        self._outputs = msgspec.msgpack.Decoder(wire.EngineCoreOutputs)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Handshake step 6: collect every engine's ready response from the input ROUTER.

        Raises:
            TimeoutError: an engine did not get ready in time.
        """
        missing = {wire.engine_identity(rank): rank for rank in self.engines}
        while missing:
            if not await self._input.poll(timeout_s * 1_000):
                raise TimeoutError(
                    f"Timed out waiting for engine core processes to start. Waited {timeout_s:g}s "
                    "(configured by --engine-ready-timeout-seconds)."
                )
            identity, payload = await self._input.recv_multipart()
            rank = missing.pop(identity, None)
            if rank is None:
                raise RuntimeError(f"Ready response of unexpected engine {wire.rank_of(identity)}")
            self.ready[rank] = msgspec.msgpack.decode(payload, type=wire.ReadyResponse)

    async def add_request(self, request: wire.EngineCoreRequest) -> None:
        """Send one request to the engine that shall serve it.

        Raises:
            EngineDeadError: there is none.
        """
        self._ensure_alive()
        request.client_index = self.client_index
        await self._send(self.engine_for(request), wire.EngineRequestType.ADD, wire.encode(request))

    def engine_for(self, request: wire.EngineCoreRequest) -> int:
        """Global rank of the engine that gets a request."""
        return self.engines[0]

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the engines to stop working on requests; unknown ids are harmless."""
        if self.engine_dead:
            return
        for rank, ids in self._by_engine(request_ids).items():
            await self._send(rank, wire.EngineRequestType.ABORT, wire.encode(ids))

    def _by_engine(self, request_ids: Iterable[str]) -> Mapping[int, list[str]]:
        ids = list(request_ids)
        return {self.engines[0]: ids} if ids else {}

    async def call_utility(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method in one engine and return its result.

        Raises:
            EngineDeadError: the engine is gone.
            UtilityError: the method failed.
        """
        self._ensure_alive()
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            call = wire.UtilityCall(self.client_index, call_id, method, list(args))
            await self._send(rank, wire.EngineRequestType.UTILITY, wire.encode(call))
            return await future
        finally:
            del self._calls[call_id]

    async def receive_outputs(self, deliver: Callable[[wire.EngineCoreOutputs], None]) -> None:
        """Give every message of outputs to `deliver`, until cancelled.

        Raises:
            EngineDeadError: an engine said that it is dying.
        """
        while True:
            frame = await self._output.recv()
            if frame == wire.ENGINE_CORE_DEAD:
                self.mark_dead()
                raise EngineDeadError
            outputs = self._outputs.decode(frame)
            if outputs.utility_output is not None:
                self._resolve(outputs.utility_output)
                continue
            self.on_outputs(outputs)
            if outputs.outputs or outputs.scheduler_stats is not None:
                deliver(outputs)

    def on_outputs(self, outputs: wire.EngineCoreOutputs) -> None:
        """What a client itself wants to know of its engines' outputs."""

    async def follow_coordinator(self, on_change: Callable[[], None]) -> None:
        """Keep up with the coordinator's publications, if there is one, until cancelled."""

    def mark_dead(self) -> None:
        """An engine is gone: nothing can be sent any more, and nothing will come."""
        self.engine_dead = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError())

    def _ensure_alive(self) -> None:
        if self.engine_dead:
            raise EngineDeadError

    def _resolve(self, output: wire.UtilityOutput) -> None:
        future = self._calls.get(output.call_id)
        if future is None or future.done():
            return
        if output.failure_message is not None:
            future.set_exception(UtilityError(output.failure_message))
        else:
            future.set_result(output.result[1] if output.result else None)

    async def _send(self, rank: int, request_type: wire.EngineRequestType, payload: bytes) -> None:
        await self._input.send_multipart((wire.engine_identity(rank), request_type, payload))


class DpEngineClient(EngineClient):
    """The client of a rank in external mode: tags requests with the wave and wakes a sleeping group."""

    def __init__(
        self,
        context: Context,
        input_socket: Socket,
        output_socket: Socket,
        managed_ranks: Iterable[int],
        client_index: int = 0,
    ) -> None:
        super().__init__(context, input_socket, output_socket, managed_ranks, client_index)
        self.waves: FrontEndWaves = FrontEndWaves()
        self._stats: Socket | None = None

    async def add_request(self, request: wire.EngineCoreRequest) -> None:
        """Send one request; the first one while the group sleeps is also announced to the coordinator."""
        self._ensure_alive()
        request.client_index = self.client_index
        request.current_wave = self.waves.current_wave
        rank = self.engine_for(request)
        await self._send(rank, wire.EngineRequestType.ADD, wire.encode(request))
        # vLLM names the target by its socket identity; see `wire.StartWave.exclude_engine`.
        first = self.waves.on_request(wire.engine_identity(rank))
        if first is not None and self._stats is not None:
            await self._stats.send(wire.encode(wire.FirstRequest(first.target, first.wave)))

    async def follow_coordinator(self, on_change: Callable[[], None]) -> None:
        """Learn wave, state and (internal mode) counts from the coordinator's front socket."""
        address = self._stats_address()
        self._stats = open_socket(self._context, zmq.XSUB, connect=address)
        decode = msgspec.msgpack.Decoder(wire.CoordinatorUpdate).decode
        try:
            await self._stats.send(wire.SUBSCRIBE)
            while True:
                update = decode(await self._stats.recv())
                counts = None if update.counts is None else tuple(_counts(entry) for entry in update.counts)
                publication = WavePublication(counts, update.current_wave, update.engines_running)
                self.waves.on_publication(publication)
                self.on_publication(publication)
                on_change()
        finally:
            self._stats.close()
            self._stats = None

    def on_publication(self, publication: WavePublication) -> None:
        """What a client itself wants to know of a publication."""

    def _stats_address(self) -> str:
        """Every engine relays the coordinator's front address in its ready response."""
        addresses = {ready.dp_stats_address for ready in self.ready.values()}
        address = next(iter(addresses), None)
        if len(addresses) != 1 or address is None:
            raise RuntimeError(f"engines disagree on the coordinator's address: {addresses}")
        return address


def _counts(entry: wire.EngineCounts) -> EngineCounts:
    waiting, running, kv_usage = entry
    return EngineCounts(int(waiting), int(running), float(kv_usage))
