"""Follows the KV cache events of one rank: subscribes, asks again for what was missed, hands on the rest.

Where a rank publishes is read from its `/kv_event_sources` (vLLM 0.32). Keeps no picture of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import zmq
import zmq.asyncio

from ext_proc.cache_events import CacheEvent
from ext_proc.vocabulary import Rank
from vllm_ranks.reports.kv_events import Batch, EventOrder, UnreadableEvents, read_batch

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
ANSWER_TIMEOUT_S = 5.0
REPLAY_TIMEOUT_S = 5.0
MAX_QUEUED_BATCHES = 10_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class CacheListener(Protocol):
    """Who wants to know what the ranks' prefix caches hold."""

    def on_cache_unknown(self, rank: Rank, *, all_to_come: bool) -> None:
        """Nothing that was known of the rank's cache holds any more.

        `all_to_come`: what follows is all that has happened since the rank started, with an empty cache.
        """
        ...

    def on_cache_events(self, rank: Rank, events: list[CacheEvent]) -> None:
        """This happened, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank publishes."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


async def find_source(session: aiohttp.ClientSession, rank: Rank) -> EventSource | None:
    """Where a rank publishes, as seen from here; `None` if it does not, or does not say."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    try:
        async with session.get(f"http://{rank.endpoint}/kv_event_sources", timeout=timeout) as answer:
            sources: dict[str, dict[str, Any]] = await answer.json() if answer.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    source = sources.get(str(rank.index))
    if not isinstance(source, dict) or not isinstance(source.get("endpoint"), str):
        return None
    replay = source.get("replay_endpoint")
    return EventSource(
        _reachable(source["endpoint"], rank),
        _reachable(replay, rank) if isinstance(replay, str) else None,
        str(source.get("topic", "")),
    )


def _reachable(endpoint: str, rank: Rank) -> str:
    """The address to connect to where a rank listens on all of its machine's."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[?::\]?):", f"tcp://{rank.endpoint.rpartition(':')[0]}:", endpoint)


class KvSubscriber:
    """Follows one rank until cancelled."""

    def __init__(self, rank: Rank, listener: CacheListener) -> None:
        self._rank = rank
        self._listener = listener
        self._has_all = False
        """Whether all that the rank has published was handed on."""

    async def run(self, session: aiohttp.ClientSession, context: zmq.asyncio.Context) -> None:
        """Subscribe as soon as the rank says where it publishes; look again when that may have changed."""
        while True:
            source = await find_source(session, self._rank)
            if source is not None:
                await self._follow(context, source, session)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _follow(
        self, context: zmq.asyncio.Context, source: EventSource, session: aiohttp.ClientSession
    ) -> None:
        """Hand on events until the rank publishes elsewhere."""
        order = EventOrder()
        with context.socket(zmq.SUB) as subscriber:
            subscriber.linger = 0
            subscriber.set_hwm(MAX_QUEUED_BATCHES)
            subscriber.subscribe(source.topic)
            subscriber.connect(source.endpoint)
            log.info("following the KV cache events of rank %s at %s", self._rank.name, source.endpoint)
            self._learn_anew(order, await replay(context, source, 0))
            while True:
                if await subscriber.poll(LOOK_AGAIN_S * 1000):
                    frames = await subscriber.recv_multipart()
                    if (batch := batch_of(frames)) is not None and not order.is_known(batch):
                        await self._take(context, source, order, batch)
                elif await find_source(session, self._rank) not in (source, None):
                    return

    async def _take(
        self, context: zmq.asyncio.Context, source: EventSource, order: EventOrder, batch: Batch
    ) -> None:
        gap = order.accept(batch)
        if gap is None and (self._has_all or batch.sequence > 0):
            self._hand_on([batch])
            return
        if gap is None:
            self._learn_anew(order, [batch])  # the rank's first one: nothing has been missed after all
            return
        # What is sent again goes up to now, so it has this batch too.
        again = await replay(context, source, gap.first)
        if gap.restarted or not again or again[0].sequence != gap.first:
            log.info("rank %s: KV cache events were lost; its cache is learned anew", self._rank.name)
            self._learn_anew(order, again or [batch])
        else:
            order.replayed(again)
            self._hand_on(again)

    def _learn_anew(self, order: EventOrder, batches: list[Batch] | None) -> None:
        """Begin with these batches; `None`: it is not known what there is."""
        self._has_all = batches is not None and (not batches or batches[0].sequence == 0)
        self._listener.on_cache_unknown(self._rank, all_to_come=self._has_all)
        order.replayed(batches or [])
        self._hand_on(batches or [])

    def _hand_on(self, batches: list[Batch]) -> None:
        for batch in batches:
            try:
                self._listener.on_cache_events(self._rank, read_batch(batch.payload))
            except UnreadableEvents as error:
                log.warning("rank %s: %s", self._rank.name, error)
                self._has_all = False
                self._listener.on_cache_unknown(self._rank, all_to_come=False)


async def follow_all(ranks: Iterable[Rank], listener: CacheListener) -> None:
    """Follow all ranks until cancelled."""
    with zmq.asyncio.Context() as context:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            for rank in ranks:
                tasks.create_task(KvSubscriber(rank, listener).run(session, context))


async def replay(context: zmq.asyncio.Context, source: EventSource, first: int) -> list[Batch] | None:
    """The batches from `first` on that the publisher has kept; `None` if it does not answer."""
    if source.replay_endpoint is None:
        return None
    batches: list[Batch] = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(source.replay_endpoint)
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await dealer.send_multipart([b"", first.to_bytes(8, "big")])
                while (frames := await dealer.recv_multipart())[-2] != END_OF_REPLAY:
                    if (batch := batch_of(frames)) is not None:
                        batches.append(batch)
        except TimeoutError:
            log.warning("%s does not send KV cache events again", source.replay_endpoint)
            return None
    return batches


def batch_of(frames: list[bytes]) -> Batch | None:
    """The batch in a message, whose last two frames are its number and its payload."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return Batch(int.from_bytes(frames[-2], "big"), frames[-1])
