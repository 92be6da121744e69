"""Following a rank's KV cache events over real sockets: late starts, losses, restarts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, CacheEvent
from ext_proc.held_blocks import HeldBlocks
from ext_proc.prompt_tokens import PromptTokens
from ext_proc.vocabulary import Rank
from vllm_ranks.reports import kv_subscriber
from vllm_ranks.reports.kv_subscriber import END_OF_REPLAY, follow_all

LIMIT_S = 15.0


class StandInPublisher:
    """A rank that publishes events as vLLM does, and can lose some on the way."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.IPV6, int(":" in host))
        self._publisher = self._context.socket(zmq.PUB)
        self._replayer = self._context.socket(zmq.ROUTER)
        self.port = self._publisher.bind_to_random_port(f"tcp://{host}")
        self.replay_port = self._replayer.bind_to_random_port(f"tcp://{host}")
        self.kept: list[tuple[int, bytes]] = []
        self.nonsense: list[bytes] | None = None
        """Sent before anything that is asked for again."""
        self.sequence = 0
        self._serving = asyncio.create_task(self._serve())

    async def publish(self, *events: Any, lost: bool = False) -> None:
        """A batch; `lost`: it never arrives."""
        payload = msgspec.msgpack.encode([float(self.sequence), list(events), 0])
        self.kept.append((self.sequence, payload))
        if not lost:
            await self._publisher.send_multipart([b"", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._replayer.recv_multipart()
            first = int.from_bytes(start, "big")
            if self.nonsense is not None:
                await self._replayer.send_multipart([client, *self.nonsense])
            for sequence, payload in self.kept:
                if sequence >= first:
                    number = sequence.to_bytes(8, "big")
                    await self._replayer.send_multipart([client, b"", b"", number, payload])
            await self._replayer.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """As when the rank ends."""
        self._serving.cancel()
        self._context.destroy(linger=0)


class Scene:
    """A rank's HTTP side, and what a subscriber has heard."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.publisher: StandInPublisher | None = None
        self.heard: list[CacheEvent] = []
        self.unknown = 0
        self.asked = 0
        self.sources_answer: web.Response | None = None
        """Instead of what is so."""
        self.held = HeldBlocks(1000)
        self.rank = Rank("g", 0, "")
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/kv_event_sources", self._sources)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host.strip("[]"), 0).start()
        self.rank = Rank("g", 0, f"{self._host}:{self._runner.addresses[0][1]}")
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        if self.publisher is not None:
            self.publisher.close()

    async def _sources(self, _request: web.Request) -> web.Response:
        self.asked += 1
        if self.sources_answer is not None:
            return web.Response(body=self.sources_answer.body, content_type="application/json")
        if self.publisher is None:
            return web.json_response({})
        source = {
            "endpoint": f"tcp://*:{self.publisher.port}",
            "replay_endpoint": f"tcp://*:{self.publisher.replay_port}",
            "topic": "",
        }
        return web.json_response({"0": source})

    def on_cache_unknown(self, _rank: Rank, *, all_to_come: bool) -> None:
        self.unknown += 1
        self.held.forget(all_to_come=all_to_come)

    def on_cache_events(self, _rank: Rank, events: list[CacheEvent]) -> None:
        self.heard += events
        self.held.apply(events)

    def cached_tokens(self, token_ids: list[int]) -> int:
        """How much of a prompt the rank has by what was heard."""
        return 2 * self.held.matched_blocks(PromptTokens(token_ids).blocks(2, None))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something heard."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def following(scene: Scene) -> AsyncIterator[None]:
    """Subscribe as long as the block lasts."""
    task = asyncio.create_task(follow_all([scene.rank], scene))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """A rank that publishes."""
    monkeypatch.setattr(kv_subscriber, "LOOK_AGAIN_S", 0.2)
    async with Scene() as scene:
        scene.publisher = StandInPublisher()
        yield scene


def removed(number: int) -> dict[str, Any]:
    """An event that can be told from others."""
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}


def stored(number: int, token_ids: list[int], parent: int | None = None) -> dict[str, Any]:
    """A block of two tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
    }


def numbers(scene: Scene) -> list[Any]:
    """The numbered events heard, in order."""
    return [event.block_hashes[0] for event in scene.heard if isinstance(event, BlocksRemoved)]


async def test_events_are_handed_on_in_order(scene: Scene) -> None:
    assert scene.publisher is not None
    async with following(scene):
        await scene.until(lambda: scene.unknown == 1)
        for number in range(5):
            await scene.publisher.publish(removed(number))
        await scene.until(lambda: numbers(scene) == [0, 1, 2, 3, 4])
    assert scene.unknown == 1


async def test_what_was_published_before_is_asked_for(scene: Scene) -> None:
    assert scene.publisher is not None
    for number in range(3):
        await scene.publisher.publish(removed(number))
    async with following(scene):
        await scene.until(lambda: numbers(scene) == [0, 1, 2])
        await scene.publisher.publish(removed(3))
        await scene.until(lambda: numbers(scene) == [0, 1, 2, 3])
    assert scene.held.is_whole


async def test_a_cache_of_which_the_beginning_is_not_kept_is_not_known_wholly(scene: Scene) -> None:
    assert scene.publisher is not None
    for number in range(3):
        await scene.publisher.publish(stored(number, [number, number]))
    del scene.publisher.kept[0]
    async with following(scene):
        await scene.until(lambda: scene.cached_tokens([2, 2]) == 2)
        assert not scene.held.is_whole
        await scene.publisher.publish({"type": "AllBlocksCleared"})
        await scene.until(lambda: scene.held.is_whole)


async def test_a_rank_at_an_ipv6_address_is_followed_and_asked_for_what_was_before() -> None:
    async with Scene("[::1]") as scene:
        scene.publisher = StandInPublisher("[::1]")
        await scene.publisher.publish(removed(0))
        async with following(scene):
            await scene.until(lambda: numbers(scene) == [0])
            await scene.publisher.publish(removed(1))
            await scene.until(lambda: numbers(scene) == [0, 1])


async def test_a_lost_batch_is_asked_for_and_comes_in_its_place(scene: Scene) -> None:
    assert scene.publisher is not None
    async with following(scene):
        await scene.until(lambda: scene.unknown == 1)
        await scene.publisher.publish(stored(1, [1, 2]))
        await scene.publisher.publish(stored(2, [3, 4], parent=1), lost=True)
        await scene.publisher.publish(stored(3, [5, 6], parent=2))
        await scene.until(lambda: scene.cached_tokens([1, 2, 3, 4, 5, 6]) == 6)
    assert scene.unknown == 1


async def test_what_is_lost_for_good_makes_the_cache_unknown(scene: Scene) -> None:
    assert scene.publisher is not None
    async with following(scene):
        await scene.until(lambda: scene.unknown == 1)
        await scene.publisher.publish(stored(1, [1, 2]))
        await scene.until(lambda: scene.cached_tokens([1, 2]) == 2)
        await scene.publisher.publish(removed(1), lost=True)
        scene.publisher.kept.clear()
        await scene.publisher.publish(stored(9, [7, 8]))
        await scene.until(lambda: scene.unknown == 2)
        await scene.until(lambda: scene.cached_tokens([7, 8]) == 2)
    assert scene.cached_tokens([1, 2]) == 0
    assert not scene.held.is_whole


async def test_a_rank_that_starts_anew_is_learned_anew(scene: Scene) -> None:
    assert scene.publisher is not None
    async with following(scene):
        await scene.until(lambda: scene.unknown == 1)
        for number in range(3):
            await scene.publisher.publish(stored(number, [number, number]))
        await scene.until(lambda: len(scene.held) == 3)
        scene.publisher.kept.clear()
        scene.publisher.sequence = 0
        await scene.publisher.publish({"type": "AllBlocksCleared"})
        await scene.until(lambda: scene.unknown == 2)
        await scene.until(lambda: AllBlocksCleared() in scene.heard)
    assert len(scene.held) == 0


async def test_a_rank_that_publishes_later_or_elsewhere_is_found(scene: Scene) -> None:
    scene.publisher, first = None, scene.publisher
    assert first is not None
    first.close()
    async with following(scene):
        await asyncio.sleep(0.3)
        scene.publisher = StandInPublisher()
        await scene.until(lambda: scene.unknown == 1)
        moved_from, scene.publisher = scene.publisher, StandInPublisher()
        await scene.publisher.publish(removed(7))
        await scene.until(lambda: numbers(scene) == [7])
        moved_from.close()


async def test_a_rank_without_replay_is_followed_from_now_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_subscriber, "REPLAY_TIMEOUT_S", 0.2)
    assert scene.publisher is not None
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        scene.publisher.replay_port = silent.getsockname()[1]
        async with following(scene):
            await scene.until(lambda: scene.unknown == 1)
            assert not scene.held.is_whole
            await scene.publisher.publish(removed(1))
            await scene.until(lambda: numbers(scene) == [1])
    assert scene.held.is_whole, "the rank's first batch has been seen"


async def test_what_cannot_be_read_makes_the_cache_unknown(scene: Scene) -> None:
    assert scene.publisher is not None
    async with following(scene):
        await scene.until(lambda: scene.unknown == 1)
        await scene.publisher.publish(stored(1, [1, 2]))
        await scene.until(lambda: scene.cached_tokens([1, 2]) == 2)
        await scene.publisher.publish({"type": "BlockStored"})
        await scene.until(lambda: scene.unknown == 2)
    assert (scene.cached_tokens([1, 2]), scene.held.is_whole) == (0, False)


@pytest.mark.parametrize("frames", [[], [b"", b""], [b"x"], [b"", b"", b"", b"", b""]], ids=len)
async def test_nonsense_instead_of_what_was_kept_is_passed_over(
    scene: Scene, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_subscriber, "REPLAY_TIMEOUT_S", 0.5)
    assert scene.publisher is not None
    scene.publisher.nonsense = frames
    async with following(scene):
        await scene.until(lambda: scene.unknown == 1)
        await scene.publisher.publish(removed(1))
        await scene.until(lambda: numbers(scene) == [1])


async def test_what_was_kept_is_not_read_beyond_a_bound(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_subscriber, "MAX_REPLAY_BYTES", 100)
    assert scene.publisher is not None
    for number in range(20):
        await scene.publisher.publish(removed(number))
    async with following(scene):
        await scene.until(lambda: "sends more than 100 bytes" in caplog.text)
        scene.publisher.kept.clear()
        await scene.until(lambda: scene.unknown == 1)
    assert numbers(scene) == []


async def test_a_rank_that_stops_making_sense_is_no_longer_known_wholly(scene: Scene) -> None:
    assert scene.publisher is not None
    async with following(scene):
        await scene.publisher.publish(stored(1, [1, 2]))
        await scene.until(lambda: scene.cached_tokens([1, 2]) == 2)
        scene.sources_answer = web.json_response([])
        await scene.until(lambda: scene.unknown == 2)
        assert (scene.cached_tokens([1, 2]), scene.held.is_whole) == (0, False)
        scene.sources_answer = None
        await scene.until(lambda: scene.cached_tokens([1, 2]) == 2)


@pytest.mark.parametrize("field", ["port", "replay_port"])
async def test_an_address_that_is_none_is_named_once(
    scene: Scene, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert scene.publisher is not None
    right, asked = getattr(scene.publisher, field), scene.asked
    setattr(scene.publisher, field, "nonsense")
    async with following(scene):
        await scene.until(lambda: scene.asked >= asked + 3)
        setattr(scene.publisher, field, right)
        await scene.until(lambda: scene.unknown == 1)
    assert caplog.text.count("cannot connect to 'tcp://127.0.0.1:nonsense'") == 1
