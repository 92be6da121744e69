"""Decodes messages with vLLM's own types, encodes them again, and encodes some of its own."""

import json
import sys

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
    UtilityResult,
)
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

TYPES = {
    kind.__name__: kind
    for kind in (
        EngineCoreOutputs,
        EngineCoreReadyResponse,
        EngineCoreRequest,
        EngineHandshakeMetadata,
        KVEventBatch,
    )
}

OWN = {
    "EngineCoreRequest": EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(n=1, max_tokens=7, min_tokens=2, ignore_eos=True, seed=5),
        pooling_params=None,
        arrival_time=12.5,
        lora_request=LoRARequest("poet", 3, "/poet"),
        cache_salt="salt",
        data_parallel_rank=1,
        client_index=2,
        current_wave=9,
        priority=-4,
        session_id="s",
    ),
    "EngineCoreOutputs": EngineCoreOutputs(
        engine_index=3,
        outputs=[
            EngineCoreOutput(
                request_id="r",
                new_token_ids=[5],
                finish_reason=FinishReason.LENGTH,
                events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)],
                prefill_stats=PrefillStats(num_prompt_tokens=8, num_cached_tokens=4, num_computed_tokens=4),
            )
        ],
        scheduler_stats=SchedulerStats(
            num_running_reqs=2,
            num_waiting_reqs=1,
            step_counter=16,
            current_wave=4,
            kv_cache_usage=0.25,
            prefix_cache_stats=PrefixCacheStats(queries=32, hits=16),
        ),
        timestamp=2.5,
        finished_requests={"r"},
    ),
    "UtilityOutputs": EngineCoreOutputs(
        timestamp=1.0, utility_output=UtilityOutput(call_id=4, result=UtilityResult([1, "a"]))
    ),
    "EngineHandshakeMetadata": EngineHandshakeMetadata(
        addresses=EngineZmqAddresses(
            inputs=["ipc:///a"],
            outputs=["ipc:///b"],
            coordinator_input="tcp://c",
            coordinator_output="tcp://d",
        ),
        parallel_config={"data_parallel_master_port": 5, "_data_parallel_master_port_list": [6, 7]},
    ),
    "KVEventBatch": KVEventBatch(
        ts=1.0,
        events=[
            BlockStored(
                block_hashes=[7],
                parent_block_hash=None,
                token_ids=[1, 2],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[("salt",)],
                group_idx=0,
            ),
            BlockRemoved(block_hashes=[7], medium="GPU"),
            AllBlocksCleared(),
        ],
        data_parallel_rank=1,
    ),
}


def described(value):
    """Any vLLM value as plain JSON."""
    if hasattr(value, "__struct_fields__"):
        return {name: described(getattr(value, name)) for name in value.__struct_fields__}
    if hasattr(value, "__dataclass_fields__"):
        return {name: described(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, UtilityResult):
        return described(value.result)
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(described, value))
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return value


def main() -> None:
    question = json.loads(sys.stdin.readline())
    decoded = {}
    for name, (kind, encoded) in question.items():
        value = MsgpackDecoder(TYPES[kind]).decode(bytes.fromhex(encoded))
        again = b"".join(map(bytes, MsgpackEncoder().encode(value)))
        decoded[name] = {"fields": described(value), "again": again.hex()}
    own = {name: b"".join(map(bytes, MsgpackEncoder().encode(value))).hex() for name, value in OWN.items()}
    print("ANSWER " + json.dumps({"decoded": decoded, "own": own}, default=str), flush=True)


if __name__ == "__main__":
    assert msgspec
    main()
