"""Messages in both directions between the embedded engine's types and vLLM's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.builders_vllm import ask_vllm
from vllm_ranks.engine import wire
from vllm_ranks.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from vllm_ranks.engine.request import FinishReason

pytestmark = pytest.mark.vllm

REQUEST = wire.EngineCoreRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 4_311_810_303],
    mm_features=None,
    sampling_params=wire.SamplingParams(seed=5, ignore_eos=True, max_tokens=7, min_tokens=2),
    pooling_params=None,
    arrival_time=12.5,
    lora_request=wire.LoraRequest("poet", 3, "/poet"),
    cache_salt="salt",
    data_parallel_rank=1,
    client_index=2,
    current_wave=9,
    priority=-4,
    external_req_id="outer",
    session_id="s",
)
OUTPUTS = wire.EngineCoreOutputs(
    engine_index=3,
    outputs=[
        wire.EngineCoreOutput(
            "r",
            [5],
            finish_reason=FinishReason.LENGTH,
            events=[wire.EngineEvent(wire.EngineEventType.SCHEDULED, 1.5)],
            prefill_stats=wire.PrefillStats(num_prompt_tokens=8, num_computed_tokens=4, num_cached_tokens=4),
        )
    ],
    scheduler_stats=wire.SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=1,
        step_counter=16,
        current_wave=4,
        kv_cache_usage=0.25,
        prefix_cache_stats=wire.PrefixCacheStats(queries=32, hits=16),
        running_lora_adapters={"poet": 1},
    ),
    timestamp=2.5,
    finished_requests=["r"],
)
UTILITY = wire.EngineCoreOutputs(timestamp=1.0, utility_output=wire.UtilityOutput(4, result=[None, [1, "a"]]))
READY = wire.ReadyResponse(
    max_model_len=1000,
    num_gpu_blocks=64,
    block_size=16,
    dp_stats_address="tcp://127.0.0.1:1",
    dtype="none",
    vllm_version="0.32.0+wavegate.embedded",
    world_size=1,
    data_parallel_size=2,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    decode_context_parallel_size=1,
    data_parallel_rank=1,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    instance_id="i",
    supports_lora=False,
    max_loras=0,
    kv_cache_size_tokens=1008,
    kv_events_config=wire.PublisherConfig(True, "zmq", "tcp://*:1", None, 1, 2, 3, "t"),
)
INIT = wire.HandshakeInit(
    wire.EngineAddresses(["ipc:///a"], ["ipc:///b"], "tcp://c", "tcp://d", "tcp://e"),
    {"data_parallel_master_ip": "127.0.0.1", "data_parallel_master_port": 5, "data_parallel_size": 2},
)
EVENTS = EventBatch(
    1.0,
    [
        BlockStored([7], None, [1, 2], 2, 1, "GPU", "poet", [("poet", "salt")]),
        BlockRemoved([7], "GPU"),
        AllBlocksCleared(),
    ],
    1,
)
OURS: dict[str, tuple[str, msgspec.Struct]] = {
    "request": ("EngineCoreRequest", REQUEST),
    "outputs": ("EngineCoreOutputs", OUTPUTS),
    "utility": ("EngineCoreOutputs", UTILITY),
    "wave complete": ("EngineCoreOutputs", wire.EngineCoreOutputs(1, timestamp=1.0, wave_complete=3)),
    "start wave": ("EngineCoreOutputs", wire.EngineCoreOutputs(1, timestamp=1.0, start_wave=3)),
    "ready": ("EngineCoreReadyResponse", READY),
    "init": ("EngineHandshakeMetadata", INIT),
    "events": ("KVEventBatch", EVENTS),
}


@pytest.fixture(scope="module")
def vllm() -> Any:
    """What vLLM made of our messages, and messages of its own."""
    return ask_vllm(
        "encodings", {name: (kind, wire.encode(message).hex()) for name, (kind, message) in OURS.items()}
    )


def subset(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Fields of ours that theirs has otherwise or not at all."""
    if isinstance(ours, dict):
        return [
            problem
            for key, value in ours.items()
            for problem in (
                subset(value, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key} is unknown"]
            )
        ]
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return [f"{path}: {ours!r} != {theirs!r}"]
        return [
            p for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for p in subset(a, b, f"{path}[{i}]")
        ]
    return [] if ours == theirs else [f"{path}: {ours!r} != {theirs!r}"]


def as_fields(message: Any) -> Any:
    """A message as named fields, however it is encoded."""
    if isinstance(message, wire.UtilityOutput):
        # vLLM wraps a result; on the wire it is preceded by the types it needs for decoding.
        assert message.result is not None
        return {"call_id": message.call_id, "failure_message": None, "result": message.result[1]}
    if isinstance(message, msgspec.Struct):
        return {name: as_fields(getattr(message, name)) for name in message.__struct_fields__}
    if isinstance(message, (list, tuple)):
        return [as_fields(item) for item in message]
    if isinstance(message, dict):
        return {key: as_fields(item) for key, item in message.items()}
    return message


@pytest.mark.parametrize("name", OURS)
def test_vllm_reads_every_field_of_our_messages(vllm: Any, name: str) -> None:
    assert subset(as_fields(OURS[name][1]), vllm["decoded"][name]["fields"]) == []


@pytest.mark.parametrize("name", OURS)
def test_our_messages_survive_a_round_trip_through_vllm(vllm: Any, name: str) -> None:
    message = OURS[name][1]
    again = msgspec.msgpack.decode(bytes.fromhex(vllm["decoded"][name]["again"]), type=type(message))
    assert again == message


def own(vllm: Any, name: str, kind: type[Any]) -> Any:
    return msgspec.msgpack.decode(bytes.fromhex(vllm["own"][name]), type=kind)


def test_we_read_vllms_requests(vllm: Any) -> None:
    request = own(vllm, "EngineCoreRequest", wire.EngineCoreRequest)
    assert (request.request_id, request.prompt_token_ids) == ("r", [1, 2, 3])
    assert (request.client_index, request.current_wave, request.priority) == (2, 9, -4)
    assert (request.cache_salt, request.data_parallel_rank, request.session_id) == ("salt", 1, "s")
    parameters = request.sampling_params
    assert (parameters.max_tokens, parameters.min_tokens, parameters.ignore_eos) == (7, 2, True)
    assert (request.lora_request.lora_name, request.lora_request.lora_int_id) == ("poet", 3)


def test_we_read_vllms_outputs(vllm: Any) -> None:
    outputs = own(vllm, "EngineCoreOutputs", wire.EngineCoreOutputs)
    (output,) = outputs.outputs
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("r", [5], FinishReason.LENGTH)
    assert output.events == [wire.EngineEvent(wire.EngineEventType.QUEUED, 1.5)]
    assert output.prefill_stats.num_cached_tokens == 4
    stats = outputs.scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (2, 1, 0.25)
    assert (stats.step_counter, stats.current_wave, stats.prefix_cache_stats.hits) == (16, 4, 16)
    assert (outputs.engine_index, outputs.timestamp, outputs.finished_requests) == (3, 2.5, ["r"])


def test_we_read_vllms_utility_answers(vllm: Any) -> None:
    outputs = own(vllm, "UtilityOutputs", wire.EngineCoreOutputs)
    assert outputs.utility_output == wire.UtilityOutput(4, result=[None, [1, "a"]])


def test_we_read_vllms_handshake(vllm: Any) -> None:
    init = own(vllm, "EngineHandshakeMetadata", wire.HandshakeInit)
    assert init.addresses == wire.EngineAddresses(["ipc:///a"], ["ipc:///b"], "tcp://c", "tcp://d")
    assert init.parallel_config == {"data_parallel_master_port": 5, "_data_parallel_master_port_list": [6, 7]}


def test_we_read_vllms_kv_events(vllm: Any) -> None:
    batch = own(vllm, "KVEventBatch", EventBatch)
    stored, removed, cleared = batch.events
    assert (stored.block_hashes, stored.token_ids, stored.extra_keys) == ([7], [1, 2], [("salt",)])
    assert (removed.block_hashes, cleared) == ([7], AllBlocksCleared())
    assert batch.data_parallel_rank == 1
