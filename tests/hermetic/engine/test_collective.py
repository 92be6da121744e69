"""The all-reduce of a group, over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from vllm_ranks.engine.arguments import PeerDeathPolicy
from vllm_ranks.engine.collective import Collective, CollectiveError, Operation, join


@asynccontextmanager
async def members(
    size: int, *, timeout_s: float = 5.0, on_peer_death: PeerDeathPolicy = "exit"
) -> AsyncIterator[list[Collective]]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    joined = [
        await join(
            rank,
            size,
            host="127.0.0.1",
            port=port,
            listener=listener if rank == 0 else None,
            timeout_s=timeout_s,
            on_peer_death=on_peer_death,
        )
        for rank in range(size)
    ]
    try:
        yield joined
    finally:
        for member in joined:
            member.close()


async def reduce_all(group: list[Collective], operation: Operation, values: list[float]) -> list[float]:
    return await asyncio.gather(
        *(member.all_reduce(operation, value) for member, value in zip(group, values, strict=True))
    )


async def test_everybody_gets_the_largest_value_or_the_sum() -> None:
    async with members(4) as group:
        assert await reduce_all(group, Operation.MAX, [1.0, 5.0, 2.0, 3.0]) == [5.0] * 4
        assert await reduce_all(group, Operation.SUM, [1.0, 0.0, 1.0, 0.0]) == [2.0] * 4


async def test_many_rounds_in_a_row_stay_in_step() -> None:
    async with members(3) as group:

        async def rounds(member: Collective, rank: int) -> list[float]:
            return [await member.all_reduce(Operation.MAX, round_ * 10 + rank) for round_ in range(200)]

        results = await asyncio.gather(*(rounds(member, rank) for rank, member in enumerate(group)))
        assert results == [[round_ * 10 + 2 for round_ in range(200)]] * 3


async def test_a_missing_rank_blocks_everybody() -> None:
    async with members(3) as group:
        waiting = asyncio.gather(*(member.all_reduce(Operation.MAX, 1.0) for member in group[:2]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await group[2].all_reduce(Operation.MAX, 7.0)
        assert await waiting == [7.0, 7.0]


@pytest.mark.parametrize("waiting", [0, 1])
async def test_waiting_for_a_missing_rank_ends_at_the_timeout(waiting: int) -> None:
    async with members(2, timeout_s=0.2) as group:
        with pytest.raises(CollectiveError, match=r"Timed out waiting 0\.2 s"):
            await group[waiting].all_reduce(Operation.MAX, 1.0)


@pytest.mark.parametrize("victim", [0, 1])
async def test_the_loss_of_a_peer_is_noticed_also_while_idle(victim: int) -> None:
    async with members(2) as group:
        await reduce_all(group, Operation.MAX, [1.0, 2.0])
        group[victim].close()
        survivor = group[1 - victim]
        with pytest.raises(CollectiveError, match=f"Connection closed by peer: rank {victim}"):
            await asyncio.wait_for(survivor.broken, 5)
        with pytest.raises(CollectiveError):
            await survivor.all_reduce(Operation.MAX, 1.0)


async def test_the_loss_of_a_peer_ends_a_wait_for_it() -> None:
    async with members(3) as group:
        waiting = asyncio.create_task(group[1].all_reduce(Operation.MAX, 1.0))
        await asyncio.sleep(0.05)
        group[0].close()
        with pytest.raises(CollectiveError, match="rank 0"):
            await waiting


async def test_under_the_policy_hang_nobody_notices_until_the_timeout() -> None:
    async with members(2, timeout_s=0.5, on_peer_death="hang") as group:
        await reduce_all(group, Operation.MAX, [1.0, 2.0])
        group[1].close()
        waiting = asyncio.create_task(group[0].all_reduce(Operation.MAX, 1.0))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        with pytest.raises(CollectiveError, match="Timed out"):
            await waiting


async def test_ranks_at_different_operations_are_an_error() -> None:
    async with members(2) as group:
        other = asyncio.create_task(group[1].all_reduce(Operation.SUM, 1.0))
        with pytest.raises(CollectiveError, match="rank 1 is at operation 2, not 1"):
            await group[0].all_reduce(Operation.MAX, 1.0)
        other.cancel()


async def test_nobody_to_join_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(CollectiveError, match="Cannot reach rank 0"):
            await join(1, 2, host="127.0.0.1", port=port, listener=None, timeout_s=1, on_peer_death="exit")
