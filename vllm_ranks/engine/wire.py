"""Messages between front end, engine and coordinator, byte-compatible with vLLM 0.32.

msgpack arrays or maps exactly as vLLM's msgspec types encode them (vllm/v1/engine/__init__.py,
vllm/v1/engine/utils.py, vllm/v1/metrics/stats.py). Arrays are positional: never reorder fields, only
append. Encoders write every field; decoders accept arrays cut after the last field they need.
Must never open a socket or decide anything.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The only frame an engine sends to each front end when it dies of an exception."""
COORDINATOR_READY = b"READY"
SUBSCRIBE = b"\x01"
UNSUBSCRIBE = b"\x00"
COORDINATOR = -1
"""Client index that means "to the coordinator" inside an engine."""


class EngineRequestType(bytes, enum.Enum):
    """First frame of a message to an engine."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


def engine_identity(rank: int) -> bytes:
    """ZMQ identity of an engine: its global rank as two little-endian bytes."""
    return rank.to_bytes(2, "little")


def rank_of(identity: bytes) -> int:
    """Inverse of `engine_identity`."""
    return int.from_bytes(identity, "little")


# --- Start-up handshake: maps --------------------------------------------------------------------


class HandshakeStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """HELLO and READY of an engine; the hash is sent with READY when data_parallel_size > 1."""

    status: str
    local: bool
    headless: bool
    parallel_config_hash: str | None = None


class EngineAddresses(msgspec.Struct, frozen=True):
    """Sockets an engine connects to."""

    inputs: list[str]
    """ROUTER of each front end."""
    outputs: list[str]
    """PULL of each front end."""
    coordinator_input: str | None = None
    """The coordinator's back XPUB: engines subscribe to it."""
    coordinator_output: str | None = None
    """The coordinator's back PULL: engines push to it."""
    frontend_stats_publish_address: str | None = None
    """The coordinator's front XPUB, relayed by engines to their front ends."""


class HandshakeInit(msgspec.Struct, frozen=True):
    """A front end's answer to HELLO."""

    addresses: EngineAddresses
    parallel_config: dict[str, int | str | list[int]]
    """Group parameters of rank 0; empty unless the group steps in lock step."""


class PublisherConfig(msgspec.Struct, frozen=True):
    """KV-event publisher of one engine with resolved endpoints."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str


class ReadyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by an engine on each input socket once its model is loaded."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: PublisherConfig | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None


# --- Requests -----------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The sampling parameters the embedded engine acts on; a subset of vLLM's map."""

    n: int = 1
    seed: int | None = None
    stop: list[str] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0


class LoraRequest(msgspec.Struct, frozen=True, array_like=True):
    """The adapter a request asks for."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """ADD: one sequence to generate."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float
    """Wall clock of the front end, in seconds."""
    lora_request: LoraRequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    """Which front end the outputs go to."""
    current_wave: int = 0
    """The wave the front end believed to be current when it sent the request."""
    priority: int = 0
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None


class UtilityCall(msgspec.Struct, frozen=True, array_like=True):
    """UTILITY: a method called in the engine."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


# --- Outputs ------------------------------------------------------------------------------------


class EngineEventType(enum.IntEnum):
    """What happened to a request inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineEvent(msgspec.Struct, frozen=True, gc=False):
    """One event with the engine's monotonic clock."""

    type: EngineEventType
    timestamp: float


class PrefillStats(msgspec.Struct, frozen=True, gc=False):
    """How a prompt was prefilled, in tokens; sent with the first output of a request."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    """0 stop, 1 length, 2 abort, 3 error, 4 repetition."""
    stop_reason: int | str | None = None
    events: list[EngineEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None


class PrefixCacheStats(msgspec.Struct, frozen=True, gc=False):
    """Prefix-cache lookups since the last report, in tokens."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SchedulerStats(msgspec.Struct, gc=False, kw_only=True):
    """The scheduler's state after a step: a map, of which vLLM's coordinator reads five keys."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = PrefixCacheStats()
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}


class UtilityOutput(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a UTILITY call: a failure message, or `[nil, value]`."""

    call_id: int
    failure_message: str | None = None
    result: list[Any] | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """Everything one step (or one event) has for one receiver."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """Monotonic clock of the engine, in seconds."""
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


# --- Waves --------------------------------------------------------------------------------------


class StartWave(msgspec.Struct, frozen=True, array_like=True):
    """START_DP_WAVE, coordinator to all engines."""

    wave: int
    exclude_engine: int | bytes | None
    """The engine that needs no wake-up. vLLM's front ends send an identity here, which engines
    compare with their integer rank: exclusion then never applies."""


class FirstRequest(msgspec.Struct, frozen=True, array_like=True):
    """Front end to coordinator: a request was sent while the group was paused."""

    target_engine: int | bytes | None
    current_wave: int


EngineCounts = list[int | float]
"""`[waiting, running, kv_cache_usage]` of one engine."""


class CoordinatorUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Coordinator to front ends; counts are absent when only the wave state changed."""

    counts: list[EngineCounts] | None
    current_wave: int
    engines_running: bool


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""msgpack bytes of any message of this module."""
