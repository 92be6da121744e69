"""From options to the configuration of one rank: vLLM 0.32's derivations, checks and error texts.

Cited as "vLLM" below: vllm/entrypoints/cli/serve.py (choice of mode), vllm/engine/arg_utils.py
(`create_engine_config`), vllm/config/parallel.py and vllm/config/scheduler.py (checks).
Must never read files, the environment or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from vllm_ranks.engine.arguments import ModelKind, RankArguments
from vllm_ranks.engine.config import (
    CacheConfig,
    KVEventsConfig,
    LoraModule,
    ParallelConfig,
    RankConfig,
    SchedulerConfig,
    ServerConfig,
)
from vllm_ranks.engine.time_model import DEFAULT_PRESET, PRESETS, StepTimeModel

DEFAULT_MASTER_IP = "127.0.0.1"
FIRST_PORT = 8_100
_INVALID = "Invalid data-parallel launch options: "


class ConfigError(ValueError):
    """The options contradict each other or the model; the message says what to write instead."""


def create_rank_config(arguments: RankArguments) -> RankConfig:
    """Derive and check everything.

    Raises:
        ConfigError: with vLLM's text where vLLM has one.
    """
    api_server_count = _api_server_count(arguments)
    parallel = _parallel_config(arguments)
    if parallel.data_parallel_hybrid_lb and arguments.headless:
        raise ConfigError("data_parallel_hybrid_lb is not applicable in headless mode")
    port = arguments.port if arguments.port is not None else FIRST_PORT + parallel.data_parallel_rank
    _check_range("port", port, 1, 65_535)
    lora_modules = tuple(_lora_module(text) for text in arguments.lora_modules)
    if lora_modules and not arguments.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    return RankConfig(
        model=arguments.model,
        served_model_names=arguments.served_model_name or (arguments.model,),
        max_loras=arguments.max_loras if arguments.enable_lora else 0,
        lora_modules=lora_modules,
        parallel=parallel,
        scheduler=_scheduler_config(arguments),
        cache=_cache_config(arguments, parallel),
        time_model=_time_model(arguments),
        seed=arguments.seed,
        server=ServerConfig(
            host=arguments.host,
            port=port,
            api_server_count=api_server_count,
            shutdown_timeout_s=_at_least("shutdown_timeout", arguments.shutdown_timeout, 0),
            log_stats=not arguments.disable_log_stats,
            enable_server_load_tracking=arguments.enable_server_load_tracking,
            enable_prompt_tokens_details=arguments.enable_prompt_tokens_details,
            enable_request_id_headers=arguments.enable_request_id_headers,
            enable_fault_injection=arguments.enable_fault_injection,
            load_balancing_score=arguments.load_balancing_score,
            step_trace=arguments.step_trace,
            handshake_timeout_s=_above("handshake_timeout_seconds", arguments.handshake_timeout_seconds, 0),
            engine_ready_timeout_s=_above(
                "engine_ready_timeout_seconds", arguments.engine_ready_timeout_seconds, 0
            ),
            coordinator_start_timeout_s=_above(
                "coordinator_start_timeout_seconds", arguments.coordinator_start_timeout_seconds, 0
            ),
            engine_dead_grace_s=_at_least(
                "engine_dead_grace_seconds", arguments.engine_dead_grace_seconds, 0
            ),
        ),
    )


def _api_server_count(arguments: RankArguments) -> int:
    """At most one mode, and how many API servers it has by default (vLLM serve.py)."""
    external = arguments.data_parallel_external_lb or arguments.data_parallel_rank is not None
    hybrid = arguments.data_parallel_hybrid_lb or arguments.data_parallel_start_rank is not None
    count = arguments.api_server_count
    if count is not None:
        _check_range("api_server_count", count, 0, 64)
    if arguments.headless:
        if count:
            raise ConfigError(
                f"--api-server-count={count} cannot be used with --headless "
                "(no API servers are started in headless mode)."
            )
        return 0
    if external and hybrid:
        raise ConfigError(
            "Cannot use more than one data parallel load balancing mode. Choose one of: "
            "--data-parallel-external-lb (or --data-parallel-rank), "
            "--data-parallel-hybrid-lb (or --data-parallel-start-rank)."
        )
    if count is not None:
        return count
    if external:
        return 1
    if hybrid:
        return arguments.data_parallel_size_local or 1
    return arguments.data_parallel_size


@dataclass(frozen=True, slots=True)
class _Share:
    """Which ranks of the group run here, and who balances over them."""

    first_rank: int
    size_local: int
    external_lb: bool
    hybrid_lb: bool


def _parallel_config(arguments: RankArguments) -> ParallelConfig:
    size = arguments.data_parallel_size
    _check_range("data_parallel_size", size, 1, 1_024)
    model_kind: ModelKind = arguments.model_kind or ("moe" if size > 1 else "dense")
    share = _share(arguments, model_kind)
    _check_share(share, size)
    _check_range("data_parallel_rpc_port", arguments.data_parallel_rpc_port, 1, 65_535)
    return ParallelConfig(
        data_parallel_size=size,
        data_parallel_size_local=share.size_local,
        data_parallel_rank=share.first_rank,
        data_parallel_external_lb=share.external_lb,
        data_parallel_hybrid_lb=share.hybrid_lb,
        data_parallel_master_ip=arguments.data_parallel_address or DEFAULT_MASTER_IP,
        data_parallel_rpc_port=arguments.data_parallel_rpc_port,
        dp_sync_interval=int(_at_least("dp_sync_interval", arguments.dp_sync_interval, 1)),
        model_kind=model_kind,
        time_scale=_above("time_scale", arguments.time_scale, 0),
        cpu_distributed_timeout_s=_above(
            "cpu_distributed_timeout_seconds", arguments.cpu_distributed_timeout_seconds, 0
        ),
        on_peer_death=arguments.on_peer_death,
    )


def _share(arguments: RankArguments, model_kind: ModelKind) -> _Share:
    """What the options say of it (vLLM arg_utils.py)."""
    size, size_local = arguments.data_parallel_size, arguments.data_parallel_size_local
    hybrid = arguments.data_parallel_hybrid_lb
    if hybrid and arguments.data_parallel_external_lb:
        raise ConfigError(
            f"{_INVALID}`--data-parallel-hybrid-lb` and `--data-parallel-external-lb` "
            "cannot be enabled together. Enable only one load-balancing mode."
        )
    # Giving a rank, even 0, means external load balancing.
    external = arguments.data_parallel_external_lb or arguments.data_parallel_rank is not None
    if size > 1 and external and model_kind == "dense":
        raise ConfigError(
            "Non-MoE models do not support external data parallel mode. For external load balancing, "
            "launch independent vLLM instances without --data-parallel-* arguments."
        )
    if external:
        return _external_share(arguments.data_parallel_rank, size_local)
    if size_local is None:
        if hybrid:
            raise ConfigError(
                f"{_INVALID}`--data-parallel-hybrid-lb` requires `--data-parallel-size-local`. "
                "Set it to the number of data-parallel ranks on this node."
            )
        return _Share(0, size, external_lb=False, hybrid_lb=False)
    start_rank = arguments.data_parallel_start_rank
    if start_rank is not None and not arguments.headless:
        hybrid = True
    # One local rank needs no balancing: hybrid becomes external.
    external = hybrid and size_local == 1
    hybrid = hybrid and size_local not in (1, size)
    return _Share(start_rank or 0, size_local, external_lb=external, hybrid_lb=hybrid)


def _external_share(rank: int | None, size_local: int | None) -> _Share:
    if rank is None:
        raise ConfigError(
            f"{_INVALID}`--data-parallel-external-lb` requires a data-parallel rank. "
            "Set `--data-parallel-rank`."
        )
    if size_local not in (1, None):
        raise ConfigError(
            f"{_INVALID}an external data-parallel rank requires `--data-parallel-size-local 1`; "
            f"got {size_local}. Set it to 1 or omit it."
        )
    return _Share(rank, 1, external_lb=True, hybrid_lb=False)


def _check_share(share: _Share, size: int) -> None:
    """Whether a group of `size` ranks has it (vLLM parallel.py)."""
    first_rank, size_local = share.first_rank, share.size_local
    if size_local > size:
        raise ConfigError(f"data_parallel_size_local ({size_local}) must be <= data_parallel_size ({size})")
    if size_local < 1:
        raise ConfigError(
            "data_parallel_size_local must be at least 1: "
            "the embedded engine has no head node without engines"
        )
    if size <= 1 and share.external_lb:
        raise ConfigError("data_parallel_external_lb can only be set when data_parallel_size > 1")
    if not 0 <= first_rank < size:
        raise ConfigError(f"data_parallel_rank ({first_rank}) must be in the range [0, {size})")
    if first_rank + size_local > size:
        raise ConfigError(
            f"data_parallel_start_rank ({first_rank}) + data_parallel_size_local ({size_local}) "
            f"must be <= data_parallel_size ({size})"
        )


def _scheduler_config(arguments: RankArguments) -> SchedulerConfig:
    budget, sequences = arguments.max_num_batched_tokens, arguments.max_num_seqs
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_schedule_interval"):
        _at_least(name, getattr(arguments, name), 1)
    for name in ("max_num_queued_reqs", "max_num_queued_tokens", "long_prefill_token_threshold"):
        value = getattr(arguments, name)
        if value is not None:
            _at_least(name, value, 0)
    if budget < arguments.max_model_len and not arguments.enable_chunked_prefill:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) is smaller than max_model_len ({arguments.max_model_len}). "
            "This effectively limits the maximum sequence length to max_num_batched_tokens. "
            "Please increase max_num_batched_tokens or decrease max_model_len."
        )
    if budget < sequences:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs ({sequences})."
        )
    return SchedulerConfig(
        max_model_len=arguments.max_model_len,
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        max_num_queued_tokens=arguments.max_num_queued_tokens,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        policy=arguments.scheduling_policy,
        prefill_schedule_interval=arguments.prefill_schedule_interval,
    )


def _cache_config(arguments: RankArguments, parallel: ParallelConfig) -> CacheConfig:
    _at_least("block_size", arguments.block_size, 1)
    _at_least("num_gpu_blocks", arguments.num_gpu_blocks, 1)
    capacity = (arguments.num_gpu_blocks - 1) * arguments.block_size
    if arguments.max_model_len > capacity:
        # One block is reserved, as in vLLM (its null block).
        raise ConfigError(
            f"The model's max seq len ({arguments.max_model_len}) is larger than the maximum number of "
            f"tokens that can be stored in KV cache ({capacity}). Try increasing `num_gpu_blocks` "
            "or decreasing `max_model_len`."
        )
    kv_events = KVEventsConfig()
    if arguments.kv_events_config is not None:
        try:
            kv_events = msgspec.json.decode(arguments.kv_events_config, type=KVEventsConfig)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config is not the JSON object it should be: {error}") from None
    if kv_events.publisher not in (None, "zmq", "null"):
        raise ConfigError(f"Unknown event publisher '{kv_events.publisher}'")
    if kv_events.enabled:
        # Checked here so that a bad endpoint stops the launch instead of one engine.
        for rank in parallel.managed_ranks:
            for endpoint in (kv_events.endpoint, kv_events.replay_endpoint):
                offset_endpoint_port(endpoint, rank)
    return CacheConfig(
        block_size=arguments.block_size,
        num_gpu_blocks=arguments.num_gpu_blocks,
        enable_prefix_caching=arguments.enable_prefix_caching,
        kv_events=kv_events,
    )


def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
    """The endpoint of one rank: its port plus the *global* rank (vLLM vllm/distributed/kv_events.py).

    Port 0 is left to the operating system.

    Raises:
        ConfigError: transport cannot be told apart by rank, or the port leaves the valid range.
    """
    if not endpoint or data_parallel_rank == 0:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{data_parallel_rank}"
    if "tcp" not in endpoint:
        raise ConfigError("Invalid endpoint: must contain 'inproc' or 'tcp'")
    base, separator, port = endpoint.rpartition(":")
    if not separator or not port.isdigit():
        raise ConfigError(f"Invalid endpoint {endpoint!r}: write tcp://address:port")
    if int(port) == 0:
        return endpoint
    if int(port) + data_parallel_rank > 65_535:
        raise ConfigError(f"Invalid endpoint {endpoint!r}: port + rank {data_parallel_rank} exceeds 65535")
    return f"{base}:{int(port) + data_parallel_rank}"


def _time_model(arguments: RankArguments) -> StepTimeModel:
    """The preset with the given costs in place of its own."""
    preset = arguments.time_model_preset or DEFAULT_PRESET
    if preset not in PRESETS:
        raise ConfigError(f"unknown time model preset {preset!r}: choose one of {', '.join(PRESETS)}")
    # A dummy batch costs what any step costs before there is work in it, unless said otherwise.
    dummy_ms = arguments.step_fixed_ms if arguments.dummy_step_ms is None else arguments.dummy_step_ms
    given = {
        "fixed_s": _scaled(arguments.step_fixed_ms, 1e-3),
        "per_prefill_token_s": _scaled(arguments.prefill_us_per_token, 1e-6),
        "per_decode_sequence_s": _scaled(arguments.decode_us_per_sequence, 1e-6),
        "per_kv_token_s": _scaled(arguments.kv_ns_per_token, 1e-9),
        "dummy_s": _scaled(dummy_ms, 1e-3),
        "jitter_ratio": arguments.step_jitter,
        "slowdown": arguments.slowdown,
    }
    try:
        return replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise ConfigError(f"time model: {error}") from None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _lora_module(text: str) -> LoraModule:
    name, separator, path = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--lora-modules {text!r}: write name=path")
    return LoraModule(name=name, path=path)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} ({value}) must be in the range [{low}, {high}]")


def _at_least(name: str, value: float, low: float) -> float:
    if value < low:
        raise ConfigError(f"{name} ({value}) must be at least {low}")
    return value


def _above(name: str, value: float, low: float) -> float:
    if value <= low:
        raise ConfigError(f"{name} ({value}) must be above {low}")
    return value
