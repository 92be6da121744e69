"""The DP coordinator process: the sockets around `waves.CoordinatorState`.

Started by rank 0's front end only. Three sockets: front XPUB ↔ front ends, back PULL ← engines,
back XPUB ↔ engines. It prints their addresses as one JSON line on its standard output, then serves until
it is killed. Must never decide anything about waves.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from vllm_ranks.engine import wire
from vllm_ranks.engine.logs import configure_logging
from vllm_ranks.engine.processes import die_with_parent
from vllm_ranks.engine.sockets import Context, Socket, bound_address, ipc_address, open_socket, tcp_address
from vllm_ranks.engine.waves import (
    CoordinatorMessage,
    CoordinatorReady,
    CoordinatorState,
    EngineCounts,
    EngineStats,
    FirstRequest,
    StartDpWave,
    StatsOutOfOrder,
    WavePublication,
)

logger = logging.getLogger(__name__)


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator process is started with."""

    engine_count: int
    lock_step: bool
    host: str
    front_local_only: bool
    """Front ends share this host: ipc instead of tcp on `host`."""
    back_local_only: bool
    ipc_directory: str


class CoordinatorAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the coordinator can be reached."""

    front_publish: str
    back_output: str
    back_publish: str


class Coordinator:
    """One group's coordinator."""

    def __init__(self, config: CoordinatorConfig) -> None:
        context = Context()
        self._context = context
        self._front = _bind(context, zmq.XPUB, config, config.front_local_only)
        self._back_output = _bind(context, zmq.PULL, config, config.back_local_only)
        self._back = _bind(context, zmq.XPUB, config, config.back_local_only)
        self._state = CoordinatorState(config.engine_count, config.lock_step)
        self._engine_count = config.engine_count
        self._outputs = msgspec.msgpack.Decoder(wire.EngineCoreOutputs)
        self._first_request = msgspec.msgpack.Decoder(wire.FirstRequest)
        self._something_happened = asyncio.Event()

    @property
    def addresses(self) -> CoordinatorAddresses:
        return CoordinatorAddresses(
            front_publish=bound_address(self._front),
            back_output=bound_address(self._back_output),
            back_publish=bound_address(self._back),
        )

    async def serve(self) -> None:
        """Answer engines and front ends, and publish on time, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_engine_subscriptions())
                tasks.create_task(self._read_engine_outputs())
                tasks.create_task(self._read_front_ends())
                tasks.create_task(self._publish_on_time())
        finally:
            self._context.destroy(linger=0)

    async def _read_engine_subscriptions(self) -> None:
        subscribed = 0
        while True:
            frame = await self._back.recv()
            if frame == wire.SUBSCRIBE:
                await self._send(self._state.on_subscription(time.monotonic()))
                subscribed += 1
                if subscribed == self._engine_count:
                    logger.info("All engine subscriptions received by DP coordinator")
            elif frame != wire.UNSUBSCRIBE:
                logger.error("Unexpected message from an engine on the subscription socket")

    async def _read_engine_outputs(self) -> None:
        while True:
            frame = await self._back_output.recv()
            try:
                message = self._outputs.decode(frame)
            except msgspec.MsgspecError as error:
                logger.error("Unreadable message from an engine: %s", error)
                continue
            await self._send(
                self._state.on_engine_outputs(
                    message.engine_index,
                    time.monotonic(),
                    stats=_engine_stats(message.scheduler_stats),
                    wave_complete=message.wave_complete,
                    start_wave=message.start_wave,
                )
            )

    async def _read_front_ends(self) -> None:
        while True:
            frame = await self._front.recv()
            if frame in (wire.SUBSCRIBE, wire.UNSUBSCRIBE):
                continue
            try:
                message = self._first_request.decode(frame)
            except msgspec.MsgspecError as error:
                logger.error("Unreadable message from a front end: %s", error)
                continue
            request = FirstRequest(message.target_engine, message.current_wave)
            await self._send(self._state.on_first_request(request, time.monotonic()))

    async def _publish_on_time(self) -> None:
        while True:
            self._something_happened.clear()
            delay_s = self._state.next_publication_s() - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, delay_s)):
                    await self._something_happened.wait()
            except TimeoutError:
                await self._send(self._state.on_time(time.monotonic()))

    async def _send(self, messages: Sequence[CoordinatorMessage]) -> None:
        self._something_happened.set()
        for message in messages:
            match message:
                case CoordinatorReady():
                    await self._back.send(wire.COORDINATOR_READY)
                case StartDpWave(wave, exclude):
                    frames = (
                        wire.EngineRequestType.START_DP_WAVE,
                        wire.encode(wire.StartWave(wave, exclude)),
                    )
                    await self._back.send_multipart(frames)
                case WavePublication(counts, wave, running):
                    counts_list = (
                        None if counts is None else [[c.waiting, c.running, c.kv_usage] for c in counts]
                    )
                    await self._front.send(wire.encode(wire.CoordinatorUpdate(counts_list, wave, running)))
                case StatsOutOfOrder():
                    logger.warning(
                        "Stats of engine %d are for step (%d, %d), behind the newest (%d, %d)",
                        message.engine_index,
                        message.wave,
                        message.step,
                        message.newest_wave,
                        message.newest_step,
                    )


def _engine_stats(stats: wire.SchedulerStats | None) -> EngineStats | None:
    if stats is None:
        return None
    counts = EngineCounts(stats.num_waiting_reqs, stats.num_running_reqs, stats.kv_cache_usage)
    return EngineStats(counts, stats.current_wave, stats.step_counter)


def _bind(context: Context, kind: int, config: CoordinatorConfig, local_only: bool) -> Socket:
    address = ipc_address(Path(config.ipc_directory)) if local_only else tcp_address(config.host, 0)
    return open_socket(context, kind, bind=address)


async def _run(config: CoordinatorConfig) -> None:
    coordinator = Coordinator(config)
    print(msgspec.json.encode(coordinator.addresses).decode(), flush=True)
    await coordinator.serve()


def main(arguments: Sequence[str]) -> None:
    """`<parent pid> <CoordinatorConfig as JSON>`"""
    die_with_parent(int(arguments[0]))
    configure_logging("Coordinator")
    asyncio.run(_run(msgspec.json.decode(arguments[1], type=CoordinatorConfig)))


if __name__ == "__main__":
    main(sys.argv[1:])
