"""Follows the KV cache events of one rank: subscribes, asks again for what was missed, hands on the rest.

Where a rank publishes is read from its `/kv_event_sources` (vLLM 0.32). Keeps no picture of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from ext_proc.cache_events import CacheEvent
from ext_proc.vocabulary import Rank
from vllm_ranks.reports.asking import TooLong, keep_asking, read_at_most, shortened
from vllm_ranks.reports.kv_events import Batch, EventOrder, UnreadableEvents, read_batch

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
ANSWER_TIMEOUT_S = 5.0
REPLAY_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
BATCHES_AT_ONCE = 100
"""After so many, others get their turn."""
MAX_QUEUED_BATCHES = 10_000
MAX_MESSAGE_BYTES = 16 << 20
MAX_REPLAY_BYTES = 256 << 20
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


class CannotFollow(Exception):
    """Where the rank says it publishes is nowhere to subscribe."""


class _ToldSource(msgspec.Struct):
    """What a rank says of itself in `/kv_event_sources`, by its index."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str | None = None


_sources_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_source_decoder = msgspec.json.Decoder(_ToldSource)


async def find_source(session: aiohttp.ClientSession, rank: Rank) -> EventSource | None:
    """Where a rank publishes, as seen from here; `None` if it does not, or does not say.

    Raises CannotFollow.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    url = f"http://{rank.endpoint}/kv_event_sources"
    try:
        async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status != 200:
                return None
            text = await read_at_most(answer.content, MAX_ANSWER_BYTES)
    except (aiohttp.ClientError, TimeoutError):
        return None
    except TooLong as error:
        raise CannotFollow(f"/kv_event_sources is {error}") from None
    try:
        told = _sources_decoder.decode(text).get(str(rank.index))
        source = None if told is None else _source_decoder.decode(told)
    except msgspec.DecodeError as error:
        raise CannotFollow(f"/kv_event_sources is not vLLM's: {error}") from None
    if source is None:
        return None
    return EventSource(
        _reachable(source.endpoint, rank),
        None if source.replay_endpoint is None else _reachable(source.replay_endpoint, rank),
        source.topic or "",
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
        self._complaint: str | None = None

    async def run(self, session: aiohttp.ClientSession, context: zmq.asyncio.Context) -> None:
        """Subscribe as soon as the rank says where it publishes; look again when that may have changed."""
        await keep_asking(
            self._rank,
            partial(self._follow, session, context),
            failed=self._complain,
            pause_s=lambda: LOOK_AGAIN_S,
        )

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            log.warning("rank %s: KV cache events: %s", self._rank.name, shortened(complaint))
        self._complaint = complaint

    async def _follow(self, session: aiohttp.ClientSession, context: zmq.asyncio.Context) -> None:
        """Hand on events until the rank publishes elsewhere, or makes no sense."""
        try:
            source = await find_source(session, self._rank)
            if source is not None:
                with context.socket(zmq.SUB) as subscriber:
                    _set_limits(subscriber)
                    subscriber.subscribe(source.topic)
                    _connect(subscriber, source.endpoint)
                    await self._hear(session, context, source, subscriber)
        except CannotFollow as error:
            self._complain(str(error))

    async def _hear(
        self,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        source: EventSource,
        subscriber: zmq.asyncio.Socket,
    ) -> None:
        log.info("following the KV cache events of rank %s at %s", self._rank.name, source.endpoint)
        order = EventOrder()
        await self._learn_anew(order, await replay(context, source, 0))
        try:
            while True:
                if await subscriber.poll(LOOK_AGAIN_S * 1000):
                    frames = await subscriber.recv_multipart()
                    if (batch := batch_of(frames)) is not None and not order.is_known(batch):
                        await self._take(context, source, order, batch)
                    await asyncio.sleep(0)  # what is there already is received without a pause
                elif await find_source(session, self._rank) not in (source, None):
                    return
        except Exception:
            await self._learn_anew(order, None)  # from now on nobody hears what the rank removes
            raise

    async def _take(
        self, context: zmq.asyncio.Context, source: EventSource, order: EventOrder, batch: Batch
    ) -> None:
        gap = order.accept(batch)
        if gap is None and (self._has_all or batch.sequence > 0):
            await self._hand_on([batch])
            return
        if gap is None:
            await self._learn_anew(order, [batch])  # the rank's first one: nothing has been missed after all
            return
        # What is sent again goes up to now, so it has this batch too.
        again = await replay(context, source, gap.first)
        if gap.restarted or not again or again[0].sequence != gap.first:
            log.info("rank %s: KV cache events were lost; its cache is learned anew", self._rank.name)
            await self._learn_anew(order, again or [batch])
        else:
            order.replayed(again)
            await self._hand_on(again)

    async def _learn_anew(self, order: EventOrder, batches: list[Batch] | None) -> None:
        """Begin with these batches; `None`: it is not known what there is."""
        self._has_all = batches is not None and (not batches or batches[0].sequence == 0)
        self._listener.on_cache_unknown(self._rank, all_to_come=self._has_all)
        order.replayed(batches or [])
        await self._hand_on(batches or [])

    async def _hand_on(self, batches: list[Batch]) -> None:
        for position, batch in enumerate(batches, 1):
            if position % BATCHES_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                self._listener.on_cache_events(self._rank, read_batch(batch.payload))
            except UnreadableEvents as error:
                log.warning("rank %s: %s", self._rank.name, error)
                self._has_all = False
                self._listener.on_cache_unknown(self._rank, all_to_come=False)


async def follow_all(ranks: Iterable[Rank], listener: CacheListener) -> None:
    """Follow all ranks until cancelled."""
    with zmq.asyncio.Context() as context:
        context.setsockopt(zmq.IPV6, 1)  # by default ZeroMQ never reaches such addresses, and says nothing
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for rank in ranks:
                tasks.create_task(KvSubscriber(rank, listener).run(session, context))


async def replay(context: zmq.asyncio.Context, source: EventSource, first: int) -> list[Batch] | None:
    """The batches from `first` on that the publisher has kept; `None` if it does not send them.

    Raises CannotFollow.
    """
    if source.replay_endpoint is None:
        return None
    batches: list[Batch] = []
    size_bytes = 0
    with context.socket(zmq.DEALER) as dealer:
        _set_limits(dealer)
        _connect(dealer, source.replay_endpoint)
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await dealer.send_multipart([b"", first.to_bytes(8, "big")])
                while (frames := await dealer.recv_multipart())[-2:-1] != [END_OF_REPLAY]:
                    if (batch := batch_of(frames)) is not None:
                        batches.append(batch)
                        size_bytes += len(batch.payload)
                    if size_bytes > MAX_REPLAY_BYTES:
                        raise CannotFollow(
                            f"{source.replay_endpoint} sends more than {MAX_REPLAY_BYTES} bytes"
                        )
                    await asyncio.sleep(0)
        except TimeoutError:
            log.warning("%s does not send KV cache events again", source.replay_endpoint)
            return None
    return batches


def _set_limits(socket: zmq.asyncio.Socket) -> None:
    socket.linger = 0
    socket.set_hwm(MAX_QUEUED_BATCHES)
    socket.maxmsgsize = MAX_MESSAGE_BYTES


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise CannotFollow(f"cannot connect to {endpoint!r}: {error}") from None


def batch_of(frames: list[bytes]) -> Batch | None:
    """The batch in a message, whose last two frames are its number and its payload."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return Batch(int.from_bytes(frames[-2], "big"), frames[-1])
