"""One engine-core process: handshake, sockets, and the run loop around `core.EngineCore` in wall-clock time.

Start-up has the steps that `handshake` lists (vLLM 0.32 vllm/v1/engine/core.py class EngineCoreProc). One
event loop: reading inputs overlaps with the modelled step. Must never decide what runs in a step (`core`
does) or what a step costs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import zmq

from vllm_ranks.engine import collective, wire
from vllm_ranks.engine.config import ParallelConfig, RankConfig
from vllm_ranks.engine.engine_build import build_loop, ready_response
from vllm_ranks.engine.engine_controls import InjectedDeath
from vllm_ranks.engine.engine_loop import EngineLoop
from vllm_ranks.engine.handshake import GroupParameters, HandshakeError, perform_handshakes
from vllm_ranks.engine.kv_events import EventPublisher
from vllm_ranks.engine.logs import configure_logging
from vllm_ranks.engine.outputs import OutputSockets
from vllm_ranks.engine.processes import die_with_parent
from vllm_ranks.engine.sockets import Context, Socket, open_socket

logger = logging.getLogger(__name__)

READY_LOG_INTERVAL_S = 10.0


class EngineProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with."""

    rank_config: RankConfig
    data_parallel_rank: int
    """Global rank of this engine."""
    handshake_address: str
    """Rank 0's front end."""
    client_handshake_address: str | None
    """The engine's own front end, when that is another one."""
    local_client: bool
    """False: headless."""
    collective_fd: int | None
    """Rank 0 of a lock-step group: the listening socket its front end announces in the handshake."""


async def run_engine_core(config: EngineProcessConfig) -> None:
    """Start up, then step until told to stop.

    Raises:
        HandshakeError, CollectiveError: the group cannot be formed, or it broke.
    """
    rank_config, rank = config.rank_config, config.data_parallel_rank
    parallel = rank_config.parallel
    async with AsyncExitStack() as stack:
        context = Context()
        stack.callback(context.destroy, linger=4_000)
        async with perform_handshakes(
            context,
            parallel,
            rank,
            handshake_address=config.handshake_address,
            client_handshake_address=config.client_handshake_address,
            local_client=config.local_client,
            timeout_s=rank_config.server.handshake_timeout_s,
        ) as (addresses, group_parameters):
            # Step 4: load the model and join the group.
            group = await _join_group(config, group_parameters)
            if group is not None:
                stack.callback(group.close)
            kv_events = rank_config.cache.kv_events
            publisher = EventPublisher(context, kv_events, rank) if kv_events.enabled else None
            loop = build_loop(rank_config, rank, OutputSockets(context, addresses, rank), group, publisher)
            ready = wire.encode(ready_response(rank_config, rank, addresses, publisher))
            inputs = []
            for address in addresses.inputs:  # 4a, 4c
                inputs.append(
                    open_socket(context, zmq.DEALER, connect=address, identity=wire.engine_identity(rank))
                )
                await inputs[-1].send(ready)
            coordinator = await _subscribe(context, addresses, rank)  # 4b
            if coordinator is not None:  # 4d
                await _wait_for_coordinator(coordinator, group)
                inputs.append(coordinator)
            if group is not None:
                group.on_peer_death = parallel.on_peer_death
        # Step 5: leaving the handshakes sent READY.
        await _run(loop, inputs, group, publisher)


async def _run(
    loop: EngineLoop,
    inputs: Sequence[Socket],
    group: collective.Collective | None,
    publisher: EventPublisher | None,
) -> None:
    """The run loop beside the readers of its inputs; ends with the loop, dies with any of them."""
    event_loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, loop.request_shutdown)
    running = asyncio.create_task(loop.run())
    others = [asyncio.create_task(_read_inputs(socket, loop)) for socket in inputs]
    if publisher is not None:
        others.append(asyncio.create_task(publisher.serve_replay()))
    awaited: list[asyncio.Future[None]] = [running, *others]
    if group is not None:
        awaited.append(group.broken)
    try:
        while not running.done():
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
                awaited.remove(future)
    except Exception as error:
        if loop.shutting_down and isinstance(error, collective.CollectiveError):
            # The whole group is being stopped, and a peer was faster.
            logger.info("[shutdown] %s", error)
            return
        # Said at once: the front end may not wait for more than the message that follows.
        _log_death(error)
        running.cancel()
        await loop.sockets.send_engine_dead()
        raise _LoggedDeath from error
    finally:
        for task in (running, *others):
            task.cancel()


async def _read_inputs(socket: Socket, loop: EngineLoop) -> None:
    while True:
        loop.put_input(await socket.recv_multipart())


async def _join_group(
    config: EngineProcessConfig, parameters: GroupParameters
) -> collective.Collective | None:
    parallel = config.rank_config.parallel
    if not parallel.lock_step:
        return None
    return await collective.join(
        config.data_parallel_rank,
        parallel.data_parallel_size,
        host=str(parameters["data_parallel_master_ip"]),
        port=_port(parameters),
        listener=None if config.collective_fd is None else socket.socket(fileno=config.collective_fd),
        timeout_s=parallel.cpu_distributed_timeout_s,
        on_peer_death="exit",  # a group that is not complete yet cannot hang in a step
    )


def _port(parameters: GroupParameters) -> int:
    port = parameters["data_parallel_master_port"]
    if not isinstance(port, int):
        raise collective.CollectiveError(f"data_parallel_master_port is not a port: {port!r}")
    return port


async def _subscribe(context: Context, addresses: wire.EngineAddresses, rank: int) -> Socket | None:
    if addresses.coordinator_input is None:
        return None
    identity = wire.engine_identity(rank)
    socket = open_socket(context, zmq.XSUB, connect=addresses.coordinator_input, identity=identity)
    await socket.send(wire.SUBSCRIBE)
    return socket


async def _wait_for_coordinator(socket: Socket, group: collective.Collective | None) -> None:
    """No engine is ready before all are: the coordinator's READY follows the last subscription.

    The coordinator lives and dies with rank 0, whose end `group` shows.
    """
    receiving = asyncio.ensure_future(socket.recv())
    awaited = (receiving,) if group is None else (receiving, group.broken)
    while not receiving.done():
        done, _ = await asyncio.wait(
            awaited, timeout=READY_LOG_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            logger.info("Waiting for READY message from DP Coordinator...")
        elif group is not None and group.broken in done:
            receiving.cancel()
            group.broken.result()
    frame = receiving.result()
    if frame != wire.COORDINATOR_READY:
        raise RuntimeError(f"expected READY from the DP coordinator, got {frame!r}")


class _LoggedDeath(Exception):
    """The engine died, and its log says so already."""


def _log_death(error: Exception) -> None:
    expected = (HandshakeError, collective.CollectiveError, InjectedDeath, zmq.ZMQError, OSError)
    if isinstance(error, expected):
        logger.error("EngineCore died: %s", error)
    else:
        logger.error("EngineCore encountered a fatal error.", exc_info=error)


def _process_name(parallel: ParallelConfig, rank: int) -> str:
    return f"EngineCore_DP{rank}" if parallel.data_parallel_size > 1 else "EngineCore"


def main(arguments: Sequence[str]) -> None:
    """`<parent pid> <EngineProcessConfig as JSON>`"""
    die_with_parent(int(arguments[0]))
    config = msgspec.json.decode(arguments[1], type=EngineProcessConfig)
    configure_logging(_process_name(config.rank_config.parallel, config.data_parallel_rank))
    try:
        asyncio.run(run_engine_core(config))
    except _LoggedDeath:
        sys.exit(1)
    except Exception as error:
        _log_death(error)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
