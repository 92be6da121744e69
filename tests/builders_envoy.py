"""A real Envoy for tests: `async with running_envoy(config, folder) as envoy:`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from gateway.config import Config
from gateway.envoy_config import render
from gateway.envoy_process import command, locate

START_TIMEOUT_S = 30.0


def envoy_config(groups: Sequence[Sequence[str]], ext_proc: str = "127.0.0.1:1", **envoy: Any) -> Config:
    """A configuration of adopted groups g0, g1, … with these endpoints; `envoy` are fields of its section."""
    # The configuration insists that Envoy waits longer than the gateway may hold a request.
    max_hold_s = min(10.0, envoy.get("message_timeout_s", 15.0) / 2)
    return Config.model_validate(
        {
            "groups": [
                {"engine": "adopted", "name": f"g{index}", "model": "m", "endpoints": list(endpoints)}
                for index, endpoints in enumerate(groups)
            ],
            "envoy": envoy,
            "gateway": {"ext_proc_listen": ext_proc, "admission": {"max_hold_s": max_hold_s}},
        }
    )


class RunningEnvoy:
    """Where a started Envoy listens, and what it wrote."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.access_log_path = folder / "access.log"
        self.log_path = folder / "envoy.log"
        self.url = ""
        self.admin_url = ""

    async def access_log(self, lines: int = 1, *, within_s: float = 10.0) -> list[dict[str, Any]]:
        """The access log as soon as it has this many lines."""
        async with asyncio.timeout(within_s):
            while True:
                text = _content(self.access_log_path)
                written = text.splitlines()
                if len(written) >= lines and text.endswith("\n"):
                    return [json.loads(line) for line in written]
                await asyncio.sleep(0.02)

    async def stat(self, name: str) -> int:
        """One counter or gauge of Envoy's."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.admin_url}/stats", params={"filter": f"^{name}$"}) as answer,
        ):
            text = await answer.text()
            return int(text.rpartition(":")[2])

    async def healthy_ranks(self) -> dict[str, bool]:
        """Health of each endpoint of the ranks, as Envoy sees it."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.admin_url}/clusters", params={"format": "json"}) as answer,
        ):
            clusters = await answer.json()
        health = {}
        for cluster in clusters["cluster_statuses"]:
            if cluster["name"] != "ranks":
                continue
            for host in cluster["host_statuses"]:
                address = host["address"]["socket_address"]
                failed = host["health_status"].get("failed_active_health_check", False)
                health[f"{address['address']}:{address['port_value']}"] = not failed
        return health


@asynccontextmanager
async def running_envoy(
    config: Config, folder: Path, change: Callable[[Any], None] = lambda _rendered: None
) -> AsyncIterator[RunningEnvoy]:
    """Start Envoy on free ports over the configuration's ranks and ext_proc service; stop it at the end.

    `change` alters what was rendered before Envoy sees it.
    """
    rendered: Any = render(config)
    change(rendered)
    async with started_envoy(rendered, folder, config.envoy.binary) as envoy:
        yield envoy


@asynccontextmanager
async def started_envoy(
    configuration: Any, folder: Path, binary: Path | None = None
) -> AsyncIterator[RunningEnvoy]:
    """Start Envoy with this configuration, but on free ports and with its access log in `folder`."""
    (listener,) = configuration["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = 0
    configuration["admin"]["address"]["socket_address"]["port_value"] = 0
    for log in listener["filter_chains"][0]["filters"][0]["typed_config"]["access_log"]:
        if log["name"] == "envoy.access_loggers.file":
            log["typed_config"]["path"] = str(folder / "access.log")
    path = folder / "envoy.json"
    path.write_text(json.dumps(configuration))
    admin_address = folder / "admin"
    admin_address.unlink(missing_ok=True)
    log_path = folder / "envoy.log"
    with log_path.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command(locate(binary), path, worker_threads=1),
            "--admin-address-path",
            str(admin_address),
            "--log-level",
            "warning",
            stdout=output,
            stderr=output,
        )
    envoy = RunningEnvoy(process, folder)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _wait_until_ready(envoy, admin_address)
        yield envoy
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _wait_until_ready(envoy: RunningEnvoy, admin_address: Path) -> None:
    while not (address := _content(admin_address)):
        if envoy.process.returncode is not None:
            raise AssertionError(f"Envoy did not start:\n{_content(envoy.log_path)}")
        await asyncio.sleep(0.02)
    envoy.admin_url = f"http://{address}"
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{envoy.admin_url}/ready") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.02)
        async with session.get(f"{envoy.admin_url}/listeners", params={"format": "json"}) as answer:
            listeners = await answer.json()
    bound = listeners["listener_statuses"][0]["local_address"]["socket_address"]
    envoy.url = f"http://{bound['address']}:{bound['port_value']}"


def _content(path: Path) -> str:
    return path.read_text() if path.exists() else ""
