"""KV events of real ranks, live and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from tests.builders_group import FAST, RankProcess, group, rank
from tests.builders_ports import consecutive_free_ports
from vllm_ranks.engine.block_hash import event_hash, hash_prompt
from vllm_ranks.engine.kv_events import END_OF_REPLAY

PROMPT = "sixteen tokens of four characters make a block, and so on " * 4
Batch = tuple[int, list[dict[str, Any]], int]


def config(**fields: Any) -> str:
    return json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:0", **fields})


def sources(served: RankProcess) -> dict[str, dict[str, Any]]:
    answer: dict[str, dict[str, Any]] = json.loads(served.get("/kv_event_sources"))
    return answer


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = 10_000
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint.replace("*", "127.0.0.1"))
        yield socket


def decode(frames: list[bytes]) -> Batch:
    _topic, sequence, payload = frames
    _timestamp, events, rank_ = msgspec.msgpack.decode(payload)
    return int.from_bytes(sequence, "big"), events, rank_


def replayed(endpoint: str, start: int) -> list[Batch]:
    batches = []
    with connected(zmq.DEALER, endpoint) as socket:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            empty, topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if sequence == END_OF_REPLAY:
                return batches
            batches.append(decode([topic, sequence, payload]))


def test_blocks_are_announced_with_vllms_hashes_and_can_be_replayed() -> None:
    with rank(*FAST, "--kv-events-config", config(replay_endpoint="tcp://*:0")) as served:
        tokens = served.post("/tokenize", {"prompt": PROMPT})["tokens"]
        source = sources(served)["0"]
        served.complete(PROMPT, max_tokens=40, ignore_eos=True)
        batches = replayed(source["replay_endpoint"], 0)

    assert [sequence for sequence, _, _ in batches] == list(range(len(batches)))
    (first, *rest) = [event for _, events, _ in batches for event in events]
    hashes = [event_hash(block_hash) for block_hash in hash_prompt(tokens, 16)]
    assert first["type"] == "BlockStored"
    assert first["block_hashes"] == hashes
    assert first["token_ids"] == tokens[: len(hashes) * 16]
    assert (first["parent_block_hash"], first["block_size"], first["medium"]) == (None, 16, "GPU")
    # Generated text fills blocks too; each names the one before it.
    assert [event["parent_block_hash"] for event in rest] == [
        hashes[-1],
        *(e["block_hashes"][0] for e in rest[:-1]),
    ]
    assert all(len(event["token_ids"]) == 16 for event in rest)


def test_events_arrive_live_with_their_sequence_numbers() -> None:
    with (
        rank(*FAST, "--kv-events-config", config(topic="kv@here")) as served,
        connected(zmq.SUB, sources(served)["0"]["endpoint"]) as socket,
    ):
        attempts = 0
        while not socket.poll(200):  # until the publisher knows of the subscription
            attempts += 1
            served.complete(f"attempt {attempts} " * 20)
        frames = socket.recv_multipart()
        assert frames[0] == b"kv@here"
        _, events, rank_ = decode(frames)
        assert events[0]["type"] == "BlockStored"
        assert rank_ == 0


def test_what_is_evicted_is_announced_as_removed() -> None:
    options = ("--num-gpu-blocks", "65", "--max-model-len", "512")
    with rank(*FAST, *options, "--kv-events-config", config(replay_endpoint="tcp://*:0")) as served:
        for index in range(4):
            served.complete(f"{index}" * 1_600, max_tokens=1)
        events = [e for _, events, _ in replayed(sources(served)["0"]["replay_endpoint"], 0) for e in events]
    stored = [h for event in events if event["type"] == "BlockStored" for h in event["block_hashes"]]
    removed = [h for event in events if event["type"] == "BlockRemoved" for h in event["block_hashes"]]
    assert removed
    assert set(removed) <= set(stored)
    assert len(set(stored) - set(removed)) <= 64


def test_a_replay_starts_where_it_is_asked_to_and_forgets_what_is_too_old() -> None:
    events = config(replay_endpoint="tcp://*:0", buffer_steps=3)
    with rank(*FAST, "--kv-events-config", events) as served:
        for index in range(6):
            served.complete(f"prompt number {index} " * 10, max_tokens=1)
        endpoint = sources(served)["0"]["replay_endpoint"]
        newest = replayed(endpoint, 0)
        assert len(newest) == 3
        last = newest[-1][0]
        assert [sequence for sequence, _, _ in replayed(endpoint, last)] == [last]
        assert replayed(endpoint, last + 1) == []


def test_every_rank_publishes_on_its_own_port_with_its_own_number() -> None:
    port = consecutive_free_ports(2)
    with group(
        2, *FAST, "--kv-events-config", config(endpoint=f"tcp://*:{port}", replay_endpoint="tcp://*:0")
    ) as ranks:
        assert [sources(r)[str(i)]["endpoint"] for i, r in enumerate(ranks)] == [
            f"tcp://*:{port}",
            f"tcp://*:{port + 1}",
        ]
        ranks[1].complete(PROMPT)
        batches = replayed(sources(ranks[1])["1"]["replay_endpoint"], 0)
        assert {rank_ for _, _, rank_ in batches} == {1}


def test_salt_and_adapter_are_part_of_a_blocks_name() -> None:
    options = ("--enable-lora", "--lora-modules", "poet=/poet")
    with rank(*FAST, *options, "--kv-events-config", config(replay_endpoint="tcp://*:0")) as served:
        for fields in ({}, {"cache_salt": "s"}, {"model": "poet"}):
            served.complete(PROMPT, max_tokens=1, **fields)
        batches = replayed(sources(served)["0"]["replay_endpoint"], 0)
    plain, salted, adapted = [event for _, events, _ in batches for event in events]
    assert len({event["block_hashes"][0] for event in (plain, salted, adapted)}) == 3
    assert plain["extra_keys"][0] is None
    assert (salted["extra_keys"][0], salted["extra_keys"][1]) == (["s"], None)
    assert (adapted["extra_keys"][0], adapted["lora_name"], adapted["lora_id"]) == (["poet"], "poet", 1)
