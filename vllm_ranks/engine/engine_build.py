"""The parts of one engine, put together as its configuration says, and what it reports when it is ready.

Must never send, and never start anything.
"""

from __future__ import annotations

import random
import uuid

from vllm_ranks.engine import wire
from vllm_ranks.engine.collective import Collective
from vllm_ranks.engine.config import RankConfig
from vllm_ranks.engine.core import EngineCore
from vllm_ranks.engine.engine_controls import EngineControls
from vllm_ranks.engine.engine_loop import EngineLoop
from vllm_ranks.engine.engine_requests import EngineSideRequests
from vllm_ranks.engine.executor import Executor
from vllm_ranks.engine.kv_cache import KVCache
from vllm_ranks.engine.kv_events import EventPublisher
from vllm_ranks.engine.kv_listener import KvEventNotes
from vllm_ranks.engine.outputs import OutputSockets
from vllm_ranks.engine.scheduler import Scheduler, SchedulerLimits
from vllm_ranks.engine.step_outputs import StepOutputs
from vllm_ranks.engine.step_trace import StepTrace
from vllm_ranks.engine.version import VERSION
from vllm_ranks.engine.waves import WaveState


def build_loop(
    config: RankConfig,
    rank: int,
    sockets: OutputSockets,
    group: Collective | None,
    publisher: EventPublisher | None,
) -> EngineLoop:
    """One engine, ready to run."""
    parallel, limits, cache = config.parallel, config.scheduler, config.cache
    requests = EngineSideRequests(cache.block_size, limits.max_model_len, cache.enable_prefix_caching)
    notes = None if publisher is None else KvEventNotes(requests, cache.block_size)
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            prefill_schedule_interval=limits.prefill_schedule_interval,
        ),
        KVCache(
            cache.num_gpu_blocks - 1,  # vLLM keeps one block for itself
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            listener=None if notes is None else notes.add,
        ),
        limits.policy,
        block_hasher=requests.hash_generated_block,
    )
    core = EngineCore(
        scheduler,
        config.time_model,
        random.Random(f"{config.seed}/{rank}"),
        WaveState(rank, parallel.dp_sync_interval) if parallel.lock_step else None,
    )
    server, internal_balancing = config.server, parallel.publishes_queue_stats
    return EngineLoop(
        core=core,
        requests=requests,
        sockets=sockets,
        step_outputs=StepOutputs(
            core, requests, log_stats=server.log_stats, names_finished=internal_balancing
        ),
        executor=Executor(parallel.time_scale, group),
        controls=EngineControls(core, group, enable_fault_injection=server.enable_fault_injection),
        publisher=publisher,
        kv_notes=notes,
        internal_balancing=internal_balancing,
        shutdown_timeout_s=server.shutdown_timeout_s,
        step_trace=None if server.step_trace is None else StepTrace(server.step_trace, rank),
    )


def ready_response(
    config: RankConfig, rank: int, addresses: wire.EngineAddresses, publisher: EventPublisher | None
) -> wire.ReadyResponse:
    """What front ends are told once the model is loaded (handshake step 4c)."""
    parallel, limits, cache = config.parallel, config.scheduler, config.cache
    capacity_tokens = cache.num_gpu_blocks * cache.block_size
    return wire.ReadyResponse(
        max_model_len=limits.max_model_len,
        num_gpu_blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        dp_stats_address=addresses.frontend_stats_publish_address,
        dtype="none",
        vllm_version=VERSION,
        world_size=1,
        data_parallel_size=parallel.data_parallel_size,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=rank,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        instance_id=uuid.uuid4().hex[:8],
        supports_lora=config.max_loras > 0,
        max_loras=config.max_loras,
        kv_cache_size_tokens=capacity_tokens,
        kv_cache_max_concurrency=capacity_tokens / limits.max_model_len,
        kv_events_config=None if publisher is None else publisher.resolved,
        effective_attention_block_size=cache.block_size,
    )
