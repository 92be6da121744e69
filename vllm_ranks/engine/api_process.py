"""One API server: its sockets to the engines, its front end and its HTTP server, from start to end.

Used by the launcher inside its own process when there is one API server, and as a process of its own
(`python -m`) when there are several. Must never start an engine.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
import zmq
from aiohttp import web

from vllm_ranks.engine.admission import AdmissionCounters
from vllm_ranks.engine.api_server import ApiServer
from vllm_ranks.engine.client import DpEngineClient, EngineClient, EngineDeadError
from vllm_ranks.engine.client_lb import DpLoadBalancingClient
from vllm_ranks.engine.config import RankConfig
from vllm_ranks.engine.engine_launch import EngineLaunch
from vllm_ranks.engine.faults import FaultInjection
from vllm_ranks.engine.front_end import FrontEnd
from vllm_ranks.engine.logs import configure_logging
from vllm_ranks.engine.metrics import EngineMetrics
from vllm_ranks.engine.processes import die_with_parent
from vllm_ranks.engine.sockets import Context, Socket, bound_address, open_socket

logger = logging.getLogger(__name__)


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server process is started with."""

    rank_config: RankConfig
    client_index: int
    listener_fd: int
    """The bound HTTP socket, shared by all API servers."""
    bind_addresses: tuple[str, str]
    """Where to bind the sockets towards the engines: requests, outputs."""
    directory: str
    """For what the API servers share."""


class ApiService:
    """One API server's parts."""

    def __init__(
        self,
        config: RankConfig,
        context: Context,
        bind_addresses: tuple[str, str],
        *,
        client_index: int = 0,
        admission: AdmissionCounters | None = None,
    ) -> None:
        self._config = config
        self._context = context
        self._admission = admission
        self._input = open_socket(context, zmq.ROUTER, bind=bind_addresses[0])
        self._output = open_socket(context, zmq.PULL, bind=bind_addresses[1])
        self._client = _client(config, context, self._input, self._output, client_index)
        self._front_end: FrontEnd | None = None
        self._running: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    @property
    def input_address(self) -> str:
        """Where engines connect for requests."""
        return bound_address(self._input)

    @property
    def output_address(self) -> str:
        """Where engines send outputs."""
        return bound_address(self._output)

    async def wait_until_ready(self) -> None:
        """Wait for the ready response of every engine this server talks to (handshake step 6)."""
        await self._client.wait_until_ready(self._config.server.engine_ready_timeout_s)

    async def listen(self, listener: socket.socket, launch: EngineLaunch | None) -> None:
        """Begin to serve. `launch`: the processes this server started, for fault injection."""
        config = self._config
        metrics = EngineMetrics(
            config.served_model_names[0],
            self._client.engines,
            max_model_len=config.scheduler.max_model_len,
            cache_info=cache_info(config),
            max_loras=config.max_loras,
            lock_step=config.parallel.lock_step,
        )
        front_end = FrontEnd(config, self._client, metrics, self._admission)
        self._front_end = front_end
        self._running = asyncio.create_task(front_end.run())
        fault_injection = None
        if config.server.enable_fault_injection:
            fault_injection = FaultInjection(
                front_end,
                engines=lambda: [] if launch is None else launch.engines,
                coordinator=lambda: None if launch is None else launch.coordinator,
            )
        self._runner = await ApiServer(front_end, fault_injection).listen(listener)
        logger.info("Serving %s on http://%s:%d", config.model, config.server.host, config.server.port)

    async def failed(self) -> None:
        """Return when outputs can no longer be received: an engine said that it dies."""
        if self._running is None:
            raise RuntimeError("not serving")
        try:
            await asyncio.shield(self._running)
        except EngineDeadError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("The front end failed")

    def engine_died(self) -> None:
        """Fail what is under way."""
        if self._front_end is not None:
            self._front_end.engine_died()

    async def close(self) -> None:
        """Cut every connection and close the sockets."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._context.destroy(linger=0)


def _client(
    config: RankConfig, context: Context, input_socket: Socket, output_socket: Socket, client_index: int
) -> EngineClient:
    """The kind of client the mode asks for (vLLM `make_async_mp_client`)."""
    parallel, count = config.parallel, config.server.api_server_count
    ranks = parallel.managed_ranks
    if parallel.data_parallel_size == 1:
        return EngineClient(context, input_socket, output_socket, ranks, client_index)
    if parallel.data_parallel_external_lb:
        return DpEngineClient(context, input_socket, output_socket, ranks, client_index)
    score = config.server.load_balancing_score
    return DpLoadBalancingClient(context, input_socket, output_socket, ranks, client_index, count, score)


def cache_info(config: RankConfig) -> dict[str, str]:
    """Labels of `vllm:cache_config_info`: vLLM's CacheConfig, `None` where a field means nothing here."""
    cache = config.cache
    capacity_tokens = cache.num_gpu_blocks * cache.block_size
    known = {
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_cache_size_tokens": capacity_tokens,
        "kv_cache_max_concurrency": capacity_tokens / config.scheduler.max_model_len,
        "effective_attention_block_size": cache.block_size,
        "is_attention_free": False,
        "cache_dtype": "auto",
    }
    return {name: str(known.get(name)) for name in CACHE_CONFIG_FIELDS}


CACHE_CONFIG_FIELDS = (
    *("block_size", "user_specified_block_size", "kv_cache_layout", "prefix_match_unit"),
    *("gpu_memory_utilization", "cache_dtype", "is_attention_free", "num_gpu_blocks_override"),
    *("sliding_window", "enable_prefix_caching", "prefix_caching_hash_algo"),
    *("prefix_cache_retention_interval", "kv_cache_dtype_skip_layers", "mamba_page_size_padded"),
    *("skip_page_size_padded", "mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    *("mamba_cache_mode", "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len"),
    *("use_replayssm", "use_kda_recoverssm", "num_gpu_blocks", "num_cpu_blocks"),
    *("effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    *("hash_block_size", "cache_hit_alignment_tokens", "kv_sharing_fast_prefill", "swa_bounded_replay"),
    *("kv_cache_memory_bytes", "kv_offloading_size", "kv_offloading_backend", "_block_size_resolved"),
)


async def _run(config: ApiProcessConfig) -> int:
    rank_config = config.rank_config
    count = rank_config.server.api_server_count
    admission = AdmissionCounters(Path(config.directory) / "admission", config.client_index, count)
    service = ApiService(
        rank_config, Context(), config.bind_addresses, client_index=config.client_index, admission=admission
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        print(msgspec.json.encode((service.input_address, service.output_address)).decode(), flush=True)
        await service.wait_until_ready()
        await service.listen(socket.socket(fileno=config.listener_fd), None)
        stopping = asyncio.ensure_future(stop.wait())
        failing = asyncio.ensure_future(service.failed())
        await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            failing.cancel()
            return 0
        service.engine_died()
        await asyncio.wait((stopping,), timeout=rank_config.server.engine_dead_grace_s)
        return 1
    finally:
        await service.close()


def main(arguments: Sequence[str]) -> None:
    """`<parent pid> <ApiProcessConfig as JSON>`"""
    die_with_parent(int(arguments[0]))
    config = msgspec.json.decode(arguments[1], type=ApiProcessConfig)
    configure_logging(f"APIServer_{config.client_index}")
    sys.exit(uvloop.run(_run(config)))


if __name__ == "__main__":
    main(sys.argv[1:])
