"""The start-up handshake: how an engine and its front ends find each other.

A front end binds a ROUTER, an engine connects a DEALER whose identity is its rank; payloads are msgpack.

    1. HELLO  engine → front end: local or remote, headless or not
    2. Init   front end → engine: sockets to connect to; rank 0 adds the coordinator's and the group's
    3.        an external rank above 0 did 1 and 2 with rank 0, and now does them with its own front end,
              whose sockets for requests and outputs replace those of rank 0
    4.        the engine loads its model and joins its group, then
              a. connects to each front end's input socket
              b. subscribes to the coordinator
              c. sends its ready response on each input socket
              d. waits for the coordinator's READY, which follows the last engine's subscription
    5. READY  engine → front end, with the hash of its configuration: its own first, then rank 0
    6.        the front end has seen READY of every engine, and reads the ready responses of its own

No rank is ready before all are. vLLM 0.32 vllm/v1/engine/core.py (`_perform_handshakes`,
`process_input_sockets`) and vllm/v1/engine/utils.py (`wait_for_engine_startup`). Both halves of HELLO,
Init and READY are here, the rest in `engine_process` and `client`. Must never start a process.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import zmq

from vllm_ranks.engine import wire
from vllm_ranks.engine.config import ParallelConfig
from vllm_ranks.engine.sockets import Context, Socket, open_socket

logger = logging.getLogger(__name__)

HANDSHAKE_LINGER_MS = 5_000
STARTUP_LOG_INTERVAL_S = 10.0


class HandshakeError(RuntimeError):
    """The launch cannot succeed; the message says which engine and why."""


# --- Front-end half ------------------------------------------------------------------------------


class EngineState(enum.Enum):
    """How far an engine has come, as its front end sees it."""

    NEW = enum.auto()
    CONNECTED = enum.auto()
    READY = enum.auto()


class EngineRegistry:
    """Walks each expected engine NEW → CONNECTED → READY; pure, so that every error can be tested."""

    def __init__(
        self,
        parallel: ParallelConfig,
        ranks_local: Mapping[int, bool],
        init: wire.HandshakeInit,
    ) -> None:
        """`ranks_local`: expected global ranks, and whether each was started by this process."""
        self._parallel = parallel
        self._local = dict(ranks_local)
        self._init = init
        self._states = dict.fromkeys(self._local, EngineState.NEW)

    @property
    def complete(self) -> bool:
        """Every engine is READY."""
        return all(state is EngineState.READY for state in self._states.values())

    def waiting_for(self, state: EngineState) -> list[int]:
        """Ranks that are in `state`."""
        return [rank for rank, current in self._states.items() if current is state]

    def on_message(self, identity: bytes, payload: bytes) -> wire.HandshakeInit | None:
        """Take one message; return what to answer.

        Raises:
            HandshakeError: with vLLM's text.
        """
        rank = wire.rank_of(identity)
        if rank not in self._states or identity != wire.engine_identity(rank):
            raise HandshakeError(f"Message from engine with unexpected data parallel rank: {rank}")
        try:
            message = msgspec.msgpack.decode(payload, type=wire.HandshakeStatus)
        except msgspec.MsgspecError as error:
            raise HandshakeError(f"Unreadable handshake message from engine {rank}: {error}") from None
        where, expected = _place(message.local), _place(self._local[rank])
        if where != expected:
            raise HandshakeError(
                f"{message.status} message from {where} engine {rank}, expected it to be {expected}"
            )
        self._check_headless(rank, message)
        state = self._states[rank]
        if message.status == "HELLO" and state is EngineState.NEW:
            self._states[rank] = EngineState.CONNECTED
            return self._init
        if message.status == "READY" and state is EngineState.CONNECTED:
            self._check_hash(rank, message)
            self._states[rank] = EngineState.READY
            return None
        raise HandshakeError(
            f"Unexpected {message.status} message for {where} engine {rank} in {state.name} state."
        )

    def _check_headless(self, rank: int, message: wire.HandshakeStatus) -> None:
        must_be_headless = not self._parallel.local_engines_only
        if message.local or message.headless == must_be_headless:
            return
        if message.headless:
            raise HandshakeError(
                f"Remote engine {rank} must not use --headless in external or hybrid dp lb mode"
            )
        raise HandshakeError(
            f"Remote engine {rank} must use --headless unless in external or hybrid dp lb mode"
        )

    def _check_hash(self, rank: int, message: wire.HandshakeStatus) -> None:
        if not self._parallel.lock_step:
            return
        expected = self._parallel.compute_hash()
        if message.parallel_config_hash != expected:
            raise HandshakeError(
                f"Configuration mismatch detected for engine {rank}. All DP workers must have identical "
                "configurations for parameters that affect collective communication "
                "(e.g., data_parallel_size, dp_sync_interval, time_scale). "
                f"Worker hash: {message.parallel_config_hash}, Expected hash: {expected}. "
                "Please ensure all workers are started with the same command-line arguments."
            )


def _place(local: bool) -> str:
    return "local" if local else "remote"


async def wait_for_engine_startup(socket: Socket, registry: EngineRegistry) -> None:
    """Answer every engine's handshake until all are READY; no time limit, as in vLLM.

    Raises:
        HandshakeError: an engine is not the one this front end may serve.
    """
    while not registry.complete:
        if not await socket.poll(STARTUP_LOG_INTERVAL_S * 1_000):
            new, connected = (registry.waiting_for(s) for s in (EngineState.NEW, EngineState.CONNECTED))
            logger.info(
                "Waiting for engines: %s to connect, %s to get ready", new or "none", connected or "none"
            )
            continue
        frames = await socket.recv_multipart()
        if len(frames) != 2:
            raise HandshakeError(f"Handshake message of {len(frames)} frames, expected 2")
        answer = registry.on_message(*frames)
        if answer is not None:
            await socket.send_multipart((frames[0], wire.encode(answer)))


# --- Engine half ---------------------------------------------------------------------------------


GroupParameters = dict[str, int | str | list[int]]


@asynccontextmanager
async def perform_handshakes(
    context: Context,
    parallel: ParallelConfig,
    rank: int,
    *,
    handshake_address: str,
    client_handshake_address: str | None,
    local_client: bool,
    timeout_s: float,
) -> AsyncIterator[tuple[wire.EngineAddresses, GroupParameters]]:
    """HELLO and Init with everybody; leaving the context normally sends READY, own front end first.

    Args:
        handshake_address: rank 0's front end.
        client_handshake_address: the engine's own front end, when that is another one.
        local_client: false for a headless engine.

    Raises:
        HandshakeError: no answer within `timeout_s`.
    """
    is_local = local_client and client_handshake_address is None
    async with AsyncExitStack() as stack:
        # Contexts exit in reverse order: READY reaches the own front end first, then rank 0.
        init = await stack.enter_async_context(
            _handshake(context, parallel, rank, handshake_address, is_local, not local_client, timeout_s)
        )
        addresses = init.addresses
        if client_handshake_address is not None:
            own = await stack.enter_async_context(
                _handshake(context, parallel, rank, client_handshake_address, True, False, timeout_s)
            )
            addresses = msgspec.structs.replace(
                addresses, inputs=own.addresses.inputs, outputs=own.addresses.outputs
            )
        yield addresses, init.parallel_config


@asynccontextmanager
async def _handshake(
    context: Context,
    parallel: ParallelConfig,
    rank: int,
    address: str,
    local: bool,
    headless: bool,
    timeout_s: float,
) -> AsyncIterator[wire.HandshakeInit]:
    socket = open_socket(
        context,
        zmq.DEALER,
        connect=address,
        identity=wire.engine_identity(rank),
        linger_ms=HANDSHAKE_LINGER_MS,
    )
    try:
        await socket.send(wire.encode(wire.HandshakeStatus("HELLO", local, headless)))
        if not await socket.poll(timeout_s * 1_000):
            socket.linger = 0  # nobody is there to take the HELLO
            limit = f"{timeout_s / 60:g} minutes" if timeout_s >= 60 else f"{timeout_s:g} seconds"
            raise HandshakeError(f"Did not receive response from front-end process within {limit}")
        yield msgspec.msgpack.decode(await socket.recv(), type=wire.HandshakeInit)
        config_hash = parallel.compute_hash() if parallel.data_parallel_size > 1 else None
        await socket.send(wire.encode(wire.HandshakeStatus("READY", local, headless, config_hash)))
    finally:
        socket.close()


def expected_engines(parallel: ParallelConfig) -> Mapping[int, bool]:
    """Which engines shake hands with this process's front end, and which of them are local.

    Rank 0 has the coordinator, so every engine of the group comes to it; other front ends meet only
    the engines they start.
    """
    if parallel.data_parallel_rank == 0:
        local = parallel.local_ranks
        return {rank: rank in local for rank in range(parallel.data_parallel_size)}
    return dict.fromkeys(parallel.local_ranks, True)
