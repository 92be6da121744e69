"""Encodings against bytes recorded from vLLM 0.32."""

from __future__ import annotations

import msgspec
import pytest

from vllm_ranks.engine import wire
from vllm_ranks.engine.kv_events import AllBlocksCleared, BlockRemoved, EventBatch

VECTORS = [
    (
        wire.HandshakeStatus("HELLO", local=False, headless=False),
        "83a6737461747573a548454c4c4fa56c6f63616cc2a8686561646c657373c2",
    ),
    (wire.StartWave(3, None), "9203c0"),
    (wire.StartWave(3, 1), "920301"),
    (wire.StartWave(3, wire.engine_identity(1)), "9203c4020100"),
    (wire.EngineCoreOutputs(0, timestamp=1.5, wave_complete=3), "990090c0cb3ff8000000000000c0c003c0c0"),
    (wire.EngineCoreOutputs(1, timestamp=1.5, start_wave=3), "990190c0cb3ff8000000000000c0c0c003c0"),
    (wire.CoordinatorUpdate(None, 2, False), "93c002c2"),
    (
        wire.CoordinatorUpdate([[0, 0, 0.0], [0, 0, 0.0]], 0, False),
        "9392930000cb0000000000000000930000cb000000000000000000c2",
    ),
]


@pytest.mark.parametrize(
    ("message", "encoded"), VECTORS, ids=lambda value: value[:8] if isinstance(value, str) else ""
)
def test_messages_are_encoded_as_vllm_encodes_them(message: msgspec.Struct, encoded: str) -> None:
    assert wire.encode(message).hex() == encoded
    assert msgspec.msgpack.decode(bytes.fromhex(encoded), type=type(message)) == message


def test_kv_events_are_maps_with_a_type_in_an_array() -> None:
    batch = EventBatch(1.0, [AllBlocksCleared(), BlockRemoved([1], "GPU", group_idx=None)], 1)
    timestamp, events, rank = msgspec.msgpack.decode(wire.encode(batch))
    assert (timestamp, rank) == (1.0, 1)
    assert events[0] == {"type": "AllBlocksCleared"}
    assert events[1]["type"] == "BlockRemoved"


def test_arrays_may_be_cut_after_the_last_needed_field() -> None:
    outputs = msgspec.msgpack.decode(
        wire.encode([1, [], {"num_running_reqs": 2}]), type=wire.EngineCoreOutputs
    )
    assert outputs.scheduler_stats is not None
    assert (outputs.engine_index, outputs.scheduler_stats.num_running_reqs) == (1, 2)


def test_unknown_scheduler_statistics_are_ignored() -> None:
    stats = msgspec.msgpack.decode(
        wire.encode({"kv_cache_usage": 0.5, "novelty": [1]}), type=wire.SchedulerStats
    )
    assert stats.kv_cache_usage == 0.5


@pytest.mark.parametrize("rank", [0, 1, 255, 256, 1023])
def test_an_identity_is_the_rank_in_two_little_endian_bytes(rank: int) -> None:
    identity = wire.engine_identity(rank)
    assert (len(identity), wire.rank_of(identity)) == (2, rank)


def test_ready_carries_the_config_hash_only_when_there_is_one() -> None:
    assert b"parallel_config_hash" not in wire.encode(wire.HandshakeStatus("READY", True, False))
    assert b"parallel_config_hash" in wire.encode(wire.HandshakeStatus("READY", True, False, "abc"))
