"""What can be put in front of the same embedded ranks in wall clock: wavegate, Envoy alone, other routers.

Each contender gets ranks that were started for it, with cold caches. Starts and stops processes; must never
measure.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from gateway.config import Config
from gateway.config_groups import EmbeddedGroup
from gateway.envoy_process import command as envoy_command
from gateway.envoy_process import locate
from gateway.plan import WAVEGATE, rank_command
from vllm_ranks.reports.metrics_text import parse_metrics

MODEL = "wavegate-embedded"
CLUSTER = "ranks"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks that every contender gets."""

    groups: tuple[EmbeddedGroup, ...]
    folder: Path
    """For configurations and logs."""
    targets: dict[str, float]
    """`gateway.targets` of wavegate's configuration."""

    @property
    def endpoints(self) -> list[str]:
        """All ranks, `ip:port`."""
        return [rank.endpoint for group in self.groups for rank in group.ranks()]


Contender = Callable[[Stage], Any]
"""An async context manager that yields the URL to send requests to."""


class ContenderError(Exception):
    """A contender did not start; the message names it and its log."""


def groups_of(
    size: int, count: int, args: Sequence[str], *, lock_step: bool = True
) -> tuple[EmbeddedGroup, ...]:
    """`count` groups of `size` ranks on free ports."""
    return tuple(
        EmbeddedGroup(
            name=f"g{number}",
            engine="embedded",
            data_parallel_size=size,
            port=_free_ports(size),
            data_parallel_rpc_port=_free_ports(1),
            args=tuple(args),
            lock_step=lock_step,
        )
        for number in range(count)
    )


@asynccontextmanager
async def wavegate(stage: Stage) -> AsyncIterator[str]:
    """`wavegate up`: ranks, gateway and Envoy."""
    config = Config.model_validate(
        {
            "groups": [group.model_dump(mode="json") for group in stage.groups],
            "envoy": {"port": _free_ports(1), "admin_port": _free_ports(1), "access_log": "/dev/null"},
            "gateway": {
                "admin_port": _free_ports(1),
                "ext_proc_listen": f"unix:{stage.folder}/ext_proc.sock",
                "targets": stage.targets,
            },
        }
    )
    path = stage.folder / "wavegate.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    up = (*WAVEGATE, "up", "-c", str(path), "--run-dir", str(stage.folder / "run"))
    async with _running("wavegate", up, stage.folder):
        url = f"http://127.0.0.1:{config.envoy.port}"
        await _ready("wavegate", f"{url}/health", stage.folder)
        yield url


def plain_envoy(policy: str) -> Contender:
    """Envoy by itself with one of its own policies: `round_robin` or `least_request`."""

    @asynccontextmanager
    async def contender(stage: Stage) -> AsyncIterator[str]:
        port = _free_ports(1)
        path = stage.folder / "envoy.yaml"
        path.write_text(yaml.safe_dump(_plain_envoy(stage.endpoints, port, policy.upper())))
        async with _ranks(stage), _running("envoy", envoy_command(locate(None), path), stage.folder):
            url = f"http://127.0.0.1:{port}"
            await _ready("envoy", f"{url}/health", stage.folder)
            yield url

    return contender


def router(binary: Path, policy: str) -> Contender:
    """vllm-router or sglang-router with one of its policies; both take the same options."""
    launch = ("launch",) if "sglang" in binary.name else ()

    @asynccontextmanager
    async def contender(stage: Stage) -> AsyncIterator[str]:
        port = _free_ports(1)
        command = (
            *(str(binary), *launch, "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(f"http://{endpoint}" for endpoint in stage.endpoints)),
            *("--policy", policy, "--worker-startup-check-interval", "1"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_ports(1))),
        )
        async with _ranks(stage), _running(binary.name, command, stage.folder):
            url = f"http://127.0.0.1:{port}"
            await _ready(binary.name, f"{url}/health", stage.folder)
            yield url

    return contender


@asynccontextmanager
async def vllm_internal(stage: Stage) -> AsyncIterator[str]:
    """The embedded engine's internal load balancing: one API server for all engines of the first group."""
    group = stage.groups[0]
    port = _free_ports(1)
    command = (
        *(*WAVEGATE, "rank", "--model", MODEL, "--port", str(port), "--api-server-count", "1"),
        *("--data-parallel-size", str(group.data_parallel_size)),
        *("--max-num-batched-tokens", str(group.max_num_batched_tokens), *group.args),
    )
    async with _running("vllm-internal", command, stage.folder):
        url = f"http://127.0.0.1:{port}"
        await _ready("vllm-internal", f"{url}/health", stage.folder)
        yield url


async def served_by(stage: Stage) -> dict[str, int]:
    """Requests that each rank has begun to answer, from its own counters; none that cannot be asked."""
    served = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        for group in stage.groups:
            for rank in group.ranks():
                try:
                    async with session.get(f"http://{rank.endpoint}/metrics") as response:
                        counters = parse_metrics(await response.text()).counters
                except aiohttp.ClientError:
                    continue
                if counters is not None:
                    served[rank.name] = counters.first_tokens
    return served


@asynccontextmanager
async def _ranks(stage: Stage) -> AsyncIterator[None]:
    async with AsyncExitStack() as running:
        for group in stage.groups:
            for rank in group.ranks():
                await running.enter_async_context(
                    _running(f"rank-{group.name}-{rank.index}", rank_command(group, rank.index), stage.folder)
                )
        for endpoint in stage.endpoints:
            await _ready("ranks", f"http://{endpoint}/health", stage.folder)
        yield


@asynccontextmanager
async def _running(name: str, command: Sequence[str], folder: Path) -> AsyncIterator[None]:
    """One process that dies with this one; its output goes to a log."""
    guarded = (sys.executable, "-P", "-m", "vllm_ranks.engine.processes", str(os.getpid()), "--", *command)
    with (folder / f"{name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*guarded, stdout=log, stderr=log)
    try:
        yield
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _ready(name: str, url: str, folder: Path) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while True:
                    try:
                        async with session.get(url) as response:
                            if response.status == 200:
                                return
                    except (aiohttp.ClientError, TimeoutError):
                        pass
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise ContenderError(f"{name} was not ready within {READY_TIMEOUT_S:g} s; see {folder}") from None


def _free_ports(count: int) -> int:
    """The first of `count` consecutive ports that were free a moment ago."""
    for _ in range(1000):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        if first + count > 65_535:
            continue
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise ContenderError(f"no {count} consecutive free ports")


def _plain_envoy(endpoints: Sequence[str], port: int, policy: str) -> dict[str, Any]:
    """Configuration of an Envoy that does nothing but balance, by one of its own policies."""
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "plain",
                    "address": _address("127.0.0.1", port),
                    "filter_chains": [{"filters": [_http_filter()]}],
                }
            ],
            "clusters": [_cluster(endpoints, policy)],
        }
    }


def _http_filter() -> dict[str, Any]:
    """Passes every request on, however long it takes."""
    extensions = "type.googleapis.com/envoy.extensions.filters"
    route = {"match": {"prefix": "/"}, "route": {"cluster": CLUSTER, "timeout": "0s"}}
    hosts = [{"name": CLUSTER, "domains": ["*"], "routes": [route]}]
    router_type = f"{extensions}.http.router.v3.Router"
    manager = "http_connection_manager"
    return {
        "name": f"envoy.filters.network.{manager}",
        "typed_config": {
            "@type": f"{extensions}.network.{manager}.v3.HttpConnectionManager",
            "stat_prefix": "plain",
            "stream_idle_timeout": "0s",
            "route_config": {"virtual_hosts": hosts},
            "http_filters": [
                {"name": "envoy.filters.http.router", "typed_config": {"@type": router_type}},
            ],
        },
    }


def _cluster(endpoints: Sequence[str], policy: str) -> dict[str, Any]:
    hosts = [endpoint.rpartition(":") for endpoint in endpoints]
    members = [{"endpoint": {"address": _address(host, int(port))}} for host, _, port in hosts]
    return {
        "name": CLUSTER,
        "type": "STATIC",
        "lb_policy": policy,
        "load_assignment": {"cluster_name": CLUSTER, "endpoints": [{"lb_endpoints": members}]},
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
