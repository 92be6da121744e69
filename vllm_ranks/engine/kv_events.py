"""KV-cache events over ZMQ: what is in this rank's prefix cache, for whoever routes by it.

Frames `[topic, sequence number, payload]` on PUB, with a replay server for those who missed some; the
encoding is vLLM 0.32's (vllm/distributed/kv_events.py): the batch is an array, its events are maps with
the tag `type`. Sequence numbers start at 0 with every process. Must never look into the scheduler.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections import deque
from typing import Any

import msgspec
import zmq

from vllm_ranks.engine import wire
from vllm_ranks.engine.config import KVEventsConfig
from vllm_ranks.engine.derivation import offset_endpoint_port
from vllm_ranks.engine.sockets import Context, Socket, tcp_address

logger = logging.getLogger(__name__)

MEDIUM = "GPU"
"""vLLM says so for every engine's own cache, also on CPUs."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_ANY_INTERFACE_ANY_PORT = "tcp://*:0"


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Full blocks became findable."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """One entry per block: the LoRA's name, the cache salt; `None` for neither."""
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks lost their content."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The whole cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Everything one step changed."""

    ts: float
    """Wall clock, in seconds."""
    events: list[Event]
    data_parallel_rank: int | None = None


class EventPublisher:
    """One rank's PUB and replay sockets."""

    def __init__(self, context: Context, config: KVEventsConfig, data_parallel_rank: int) -> None:
        """Bind (or connect) the rank's own endpoints: the configured port plus the global rank.

        Raises:
            zmq.ZMQError: an endpoint is taken or malformed.
        """
        self._rank = data_parallel_rank
        self._topic = config.topic.encode()
        self._sequence = itertools.count()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._publish = context.socket(zmq.PUB)
        self._publish.set_hwm(config.hwm)
        endpoint = offset_endpoint_port(config.endpoint, data_parallel_rank) or config.endpoint
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            endpoint = _bind(self._publish, endpoint)
        else:
            self._publish.connect(endpoint)
        self._replay: Socket | None = None
        replay_endpoint = offset_endpoint_port(config.replay_endpoint, data_parallel_rank)
        if replay_endpoint is not None:
            self._replay = context.socket(zmq.ROUTER)
            replay_endpoint = _bind(self._replay, replay_endpoint)
        self.resolved = wire.PublisherConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            topic=config.topic,
        )
        """What `/kv_event_sources` says: endpoints with their actual ports."""

    async def publish(self, now_s: float, events: list[Event]) -> None:
        """Send one batch; a subscriber that falls behind by `hwm` batches loses some."""
        sequence = next(self._sequence)
        payload = wire.encode(EventBatch(now_s, events, self._rank))
        self._buffer.append((sequence, payload))
        await self._publish.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    async def serve_replay(self) -> None:
        """Answer `["", start sequence]` with every buffered batch from there on, until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                logger.warning("Invalid replay request of %d frames, expected 3", len(frames))
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    await self._replay.send_multipart(
                        (client, b"", self._topic, sequence.to_bytes(8, "big"), payload)
                    )
            await self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bind(sock: Socket, endpoint: str) -> str:
    if endpoint != _ANY_INTERFACE_ANY_PORT:
        sock.bind(endpoint)
        bound = sock.getsockopt(zmq.LAST_ENDPOINT)
        # A port the system chose must be published; `*` is kept, as in vLLM.
        return bound.decode() if endpoint.endswith(":0") and isinstance(bound, bytes) else endpoint
    host = _node_ip()
    port = sock.bind_to_random_port(f"tcp://{host}")
    return tcp_address(host, port)


def _node_ip() -> str:
    """The address this host uses towards others; loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
