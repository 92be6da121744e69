"""An engine's sockets towards front ends and coordinator, and what goes through them.

Must never wait for a receiver: queues between processes are unbounded, work is bounded by the scheduler.
"""

from __future__ import annotations

import zmq

from vllm_ranks.engine import wire
from vllm_ranks.engine.sockets import Context, open_socket

OUTPUT_LINGER_MS = 4_000
"""Time for ENGINE_CORE_DEAD to leave a dying process."""


class OutputSockets:
    """PUSH to every front end and to the coordinator."""

    def __init__(self, context: Context, addresses: wire.EngineAddresses, rank: int) -> None:
        self._rank = rank
        self._front_ends = [
            open_socket(context, zmq.PUSH, connect=address, linger_ms=OUTPUT_LINGER_MS)
            for address in addresses.outputs
        ]
        self._coordinator = (
            None
            if addresses.coordinator_output is None
            else open_socket(
                context, zmq.PUSH, connect=addresses.coordinator_output, linger_ms=OUTPUT_LINGER_MS
            )
        )

    async def send(self, client_index: int, message: wire.EngineCoreOutputs) -> None:
        """Send to a front end, or to the coordinator (`wire.COORDINATOR`)."""
        message.engine_index = self._rank
        if client_index == wire.COORDINATOR:
            if self._coordinator is None:
                raise RuntimeError("this engine has no coordinator")
            await self._coordinator.send(wire.encode(message))
        else:
            await self._front_ends[client_index].send(wire.encode(message))

    async def send_engine_dead(self) -> None:
        """Tell every front end that no further output will come."""
        for socket in self._front_ends:
            await socket.send(wire.ENGINE_CORE_DEAD)
