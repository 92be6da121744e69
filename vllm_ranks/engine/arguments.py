"""What the command line of `wavegate rank` said, before anything is derived from it.

Names and defaults are those of `vllm serve` 0.32 wherever vLLM has the option; the rest belongs to
the embedded engine alone and is listed last. Must never derive or check anything: `config` does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ModelKind = Literal["moe", "dense"]
SchedulingPolicy = Literal["fcfs", "priority"]
LoadBalancingScore = Literal["current", "original"]
PeerDeathPolicy = Literal["exit", "hang"]


class RankArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `wavegate rank`; `None` means the option was not given."""

    # The model and its name.
    model: str
    served_model_name: tuple[str, ...] = ()
    max_model_len: int = 131_072
    seed: int = 0

    # The HTTP server.
    host: str = "127.0.0.1"
    port: int | None = None
    """Default 8100 + data-parallel rank, so that a group on one host needs no port options."""
    api_server_count: int | None = None
    headless: bool = False
    shutdown_timeout: float = 0.0
    disable_log_stats: bool = False
    enable_server_load_tracking: bool = False
    enable_prompt_tokens_details: bool = False
    enable_request_id_headers: bool = False

    # Data parallelism (vLLM vllm/config/parallel.py).
    data_parallel_size: int = 1
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size_local: int | None = None
    data_parallel_address: str | None = None
    data_parallel_rpc_port: int = 29_550
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    dp_sync_interval: int = 16
    cpu_distributed_timeout_seconds: float = 1_800.0

    # Scheduler (vLLM vllm/config/scheduler.py).
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    prefill_schedule_interval: int = 1

    # KV cache (vLLM vllm/config/cache.py, vllm/config/kv_events.py).
    block_size: int = 16
    num_gpu_blocks: int = 131_072
    """Capacity in blocks; vLLM measures it, or takes `--num-gpu-blocks-override`."""
    enable_prefix_caching: bool = True
    kv_events_config: str | None = None
    """JSON object, as vLLM's `--kv-events-config`."""

    # LoRA: only the names matter here, for `vllm:lora_requests_info`.
    enable_lora: bool = False
    max_loras: int = 1
    lora_modules: tuple[str, ...] = ()
    """`name=path`, as vLLM's `--lora-modules`."""

    # The embedded engine alone: what kind of model it stands for, and what a step costs.
    model_kind: ModelKind | None = None
    time_model_preset: str | None = None
    step_fixed_ms: float | None = None
    prefill_us_per_token: float | None = None
    decode_us_per_sequence: float | None = None
    kv_ns_per_token: float | None = None
    dummy_step_ms: float | None = None
    step_jitter: float | None = None
    slowdown: float = 1.0
    time_scale: float = 1.0

    # The embedded engine alone: balancing formula, faults, traces, waits that vLLM fixes in its source.
    load_balancing_score: LoadBalancingScore = "current"
    on_peer_death: PeerDeathPolicy = "exit"
    enable_fault_injection: bool = False
    step_trace: str | None = None
    handshake_timeout_seconds: float = 300.0
    engine_ready_timeout_seconds: float = 600.0
    coordinator_start_timeout_seconds: float = 120.0
    engine_dead_grace_seconds: float = 5.0
