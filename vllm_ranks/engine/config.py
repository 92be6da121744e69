"""The configuration of one rank as plain, immutable data that travels between its processes as JSON.

Made by `derivation` from what the command line said. Must never derive, check or read anything.
"""

from __future__ import annotations

import hashlib

import msgspec

from vllm_ranks.engine.arguments import LoadBalancingScore, ModelKind, PeerDeathPolicy, SchedulingPolicy
from vllm_ranks.engine.time_model import StepTimeModel


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every section."""


class ParallelConfig(_Section, frozen=True, kw_only=True):
    """Who the ranks of a group are and where they meet; vLLM vllm/config/parallel.py."""

    data_parallel_size: int
    data_parallel_size_local: int
    """Engines started by this process."""
    data_parallel_rank: int
    """Global rank of the first local engine."""
    data_parallel_external_lb: bool
    data_parallel_hybrid_lb: bool
    data_parallel_master_ip: str
    data_parallel_rpc_port: int
    dp_sync_interval: int
    model_kind: ModelKind
    time_scale: float
    """Part of this section because ranks in lock step must agree on the length of a second."""
    cpu_distributed_timeout_s: float
    """How long a collective waits for a missing peer."""
    on_peer_death: PeerDeathPolicy

    @property
    def is_moe(self) -> bool:
        """Lock step exists only for models whose experts are spread over the ranks."""
        return self.model_kind == "moe"

    @property
    def lock_step(self) -> bool:
        """Whether the engines of this deployment step together, in waves."""
        return self.is_moe and self.data_parallel_size > 1

    @property
    def local_engines_only(self) -> bool:
        """The front end talks to local engines only (external and hybrid mode)."""
        return self.data_parallel_external_lb or self.data_parallel_hybrid_lb

    @property
    def needs_coordinator(self) -> bool:
        """Waves need it in every mode; queue statistics need it in internal and hybrid mode."""
        return self.data_parallel_size > 1 and (self.is_moe or not self.data_parallel_external_lb)

    @property
    def publishes_queue_stats(self) -> bool:
        """Engines report queue lengths to the coordinator in internal and hybrid mode only."""
        return self.needs_coordinator and not self.data_parallel_external_lb

    @property
    def managed_ranks(self) -> tuple[int, ...]:
        """Global ranks of the engines this front end sends requests to."""
        count = self.data_parallel_size_local if self.local_engines_only else self.data_parallel_size
        return tuple(range(self.data_parallel_rank, self.data_parallel_rank + count))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Global ranks of the engines this process starts."""
        first = self.data_parallel_rank
        return tuple(range(first, first + self.data_parallel_size_local))

    def compute_hash(self) -> str:
        """Digest of what every rank of a group must agree on, compared in handshake step 6.

        Ranks, addresses, ports and the balancing mode are left out, as in vLLM.
        """
        factors = {
            "data_parallel_size": self.data_parallel_size,
            "dp_sync_interval": self.dp_sync_interval,
            "model_kind": self.model_kind,
            "time_scale": self.time_scale,
        }
        return hashlib.sha256(msgspec.json.encode(factors, order="sorted")).hexdigest()


class SchedulerConfig(_Section, frozen=True, kw_only=True):
    """Limits of one engine's batch and of the queue in front of it."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    policy: SchedulingPolicy
    prefill_schedule_interval: int


class KVEventsConfig(_Section, frozen=True, kw_only=True):
    """Where KV-cache events are published; vLLM vllm/config/kv_events.py."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def enabled(self) -> bool:
        """Events leave the process."""
        return self.enable_kv_cache_events and self.publisher != "null"


class CacheConfig(_Section, frozen=True, kw_only=True):
    """The KV cache of one engine."""

    block_size: int
    """Tokens per block."""
    num_gpu_blocks: int
    enable_prefix_caching: bool
    kv_events: KVEventsConfig


class LoraModule(_Section, frozen=True, kw_only=True):
    """One adapter clients may ask for by name."""

    name: str
    path: str


class ServerConfig(_Section, frozen=True, kw_only=True):
    """The HTTP side and the waits of the launch."""

    host: str
    port: int
    api_server_count: int
    """0: headless, engines only."""
    shutdown_timeout_s: float
    log_stats: bool
    enable_server_load_tracking: bool
    enable_prompt_tokens_details: bool
    enable_request_id_headers: bool
    enable_fault_injection: bool
    load_balancing_score: LoadBalancingScore
    step_trace: str | None
    """File that receives one JSON line per step."""
    handshake_timeout_s: float
    engine_ready_timeout_s: float
    coordinator_start_timeout_s: float
    engine_dead_grace_s: float
    """Time between the death of an engine and the exit of its front end (vLLM's 5 s watchdog)."""


class RankConfig(_Section, frozen=True, kw_only=True):
    """Everything one rank's processes need to know."""

    model: str
    served_model_names: tuple[str, ...]
    max_loras: int
    """0: LoRA is off."""
    lora_modules: tuple[LoraModule, ...]
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    time_model: StepTimeModel
    seed: int
    """Of the time model's jitter."""
    server: ServerConfig
