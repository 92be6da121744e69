"""All-reduce over the ranks of a lock-step group, in wall-clock time: what gloo is to vLLM's engines.

A star over TCP: rank 0's engine accepts (on the socket its front end opened and announced in the
handshake), the others connect. Every rank submits a value, all wait for the combined one; a missing peer
blocks everybody, as it does in gloo. What happens when a peer's connection breaks is a choice, because both
happen in reality: the engine dies of it (`exit`), or nobody notices and the group hangs until the
collective's timeout (`hang`). Plain TCP instead of ZMQ, so that a peer's death is seen as what it is.
Must never know what the numbers mean.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
from collections.abc import Callable, Iterable

from vllm_ranks.engine.arguments import PeerDeathPolicy

_FRAME = struct.Struct("!Bd")
_HELLO = struct.Struct("!H")


class CollectiveError(RuntimeError):
    """The group is broken: no further step is possible."""


class Operation(enum.IntEnum):
    """How the values of the ranks are combined."""

    MAX = 1
    SUM = 2


_COMBINE: dict[Operation, Callable[[Iterable[float]], float]] = {Operation.MAX: max, Operation.SUM: sum}


class Collective:
    """One rank's end of the star. Every rank must call `all_reduce` with the same operations in order."""

    def __init__(self, size: int, timeout_s: float, on_peer_death: PeerDeathPolicy) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.on_peer_death: PeerDeathPolicy = on_peer_death
        """May be changed while running."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with CollectiveError when a peer was lost under the policy `exit`."""

    async def all_reduce(self, operation: Operation, value: float) -> float:
        """Combine the values of all ranks.

        Raises:
            CollectiveError: a peer was lost, did not come within the timeout, or is at another operation.
        """
        if self.broken.done():
            self.broken.result()
        exchange = asyncio.ensure_future(self._exchange(operation, value))
        try:
            done, _ = await asyncio.wait(
                (exchange, self.broken), timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise CollectiveError(
                    f"Timed out waiting {self.timeout_s:g} s for {operation.name} all-reduce"
                )
            if exchange not in done:
                self.broken.result()
            return await exchange
        finally:
            exchange.cancel()

    async def _exchange(self, operation: Operation, value: float) -> float:
        raise NotImplementedError

    def close(self) -> None:
        """Close all connections."""
        raise NotImplementedError

    def _peer_lost(self, who: str) -> None:
        if self.on_peer_death == "exit" and not self.broken.done():
            self.broken.set_exception(CollectiveError(f"Connection closed by peer: {who}"))


class _Hub(Collective):
    """Rank 0's end: collects one value of everybody, combines, answers."""

    def __init__(self, size: int, timeout_s: float, on_peer_death: PeerDeathPolicy) -> None:
        super().__init__(size, timeout_s, on_peer_death)
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._values: dict[int, tuple[int, float]] = {}
        self._changed = asyncio.Event()
        self._reading: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_peer(reader, writer))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            (rank,) = _HELLO.unpack(await reader.readexactly(_HELLO.size))
            if not 0 < rank < self.size or rank in self._writers:
                return
            self._writers[rank] = writer
            while True:
                self._values[rank] = _FRAME.unpack(await reader.readexactly(_FRAME.size))
                self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._peer_lost("unknown rank" if rank is None else f"rank {rank}")
        finally:
            writer.close()

    async def _exchange(self, operation: Operation, value: float) -> float:
        self._values[0] = (operation, value)
        while len(self._values) < self.size:
            self._changed.clear()
            await self._changed.wait()
        for rank, (other, _) in self._values.items():
            if other != operation:
                raise CollectiveError(
                    f"Collective mismatch: rank {rank} is at operation {other}, not {operation}"
                )
        result = _COMBINE[operation](number for _, number in self._values.values())
        # Cleared before anybody is answered: the next values may arrive at once.
        self._values.clear()
        frame = _FRAME.pack(operation, result)
        for writer in self._writers.values():
            writer.write(frame)
        return result

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._reading:
            task.cancel()
        for writer in self._writers.values():
            writer.close()


class _Spoke(Collective):
    """The end of every other rank: submits, waits for the answer."""

    def __init__(self, size: int, timeout_s: float, on_peer_death: PeerDeathPolicy) -> None:
        super().__init__(size, timeout_s, on_peer_death)
        self._answers: asyncio.Queue[float] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, rank: int, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, self._writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise CollectiveError(f"Cannot reach rank 0 at {host}:{port}: {error}") from None
        self._writer.write(_HELLO.pack(rank))
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                _, answer = _FRAME.unpack(await reader.readexactly(_FRAME.size))
                self._answers.put_nowait(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._peer_lost("rank 0")

    async def _exchange(self, operation: Operation, value: float) -> float:
        if self._writer is None:
            raise RuntimeError("not connected")
        self._writer.write(_FRAME.pack(operation, value))
        return await self._answers.get()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()


async def join(
    rank: int,
    size: int,
    *,
    host: str,
    port: int,
    listener: socket.socket | None,
    timeout_s: float,
    on_peer_death: PeerDeathPolicy,
) -> Collective:
    """Take this rank's place in the group; `listener` is rank 0's listening socket.

    Raises:
        CollectiveError: rank 0 cannot be reached.
    """
    if rank == 0:
        if listener is None:
            raise ValueError("rank 0 needs the listening socket of the group")
        hub = _Hub(size, timeout_s, on_peer_death)
        await hub.listen(listener)
        return hub
    spoke = _Spoke(size, timeout_s, on_peer_death)
    await spoke.connect(rank, host, port)
    return spoke
