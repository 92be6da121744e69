"""Runs Envoy alone, where something else supervises it: a container's restart policy, a service manager.

It writes to this process's own stdout and stderr. Must never restart it: its end is the end of this process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from gateway import envoy_admin
from gateway.config import Config
from gateway.config_types import endpoint
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import command, locate
from gateway.plan import reachable
from gateway.supervisor import StopRequest
from vllm_ranks.engine.processes import Child, describe_exit, end, start

STOP_S = 5.0
"""From SIGTERM to SIGKILL: Envoy needs no time once it is drained."""

log = logging.getLogger(__name__)


async def run(config: Config) -> int:
    """Run Envoy as the configuration asks; the result is this process's exit status.

    The first SIGTERM or SIGINT drains it: no new requests, those under way may take gateway.drain_timeout_s.
    A further one stops it at once.

    Raises:
        EnvoyError: there is no Envoy.
    """
    binary = locate(config.envoy.binary)
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.signal)
    with tempfile.TemporaryDirectory(prefix="wavegate-envoy-") as folder:
        path = Path(folder) / "envoy.yaml"
        path.write_text(to_yaml(render(config)))
        envoy = await start("Envoy", command(binary, path, worker_threads=config.envoy.worker_threads))
        try:
            await _until_any(envoy, stop.requested.wait())
            if envoy.returncode is not None:
                log.error("Envoy ended by itself: %s", describe_exit(envoy.returncode))
                return 1
            await _until_any(envoy, stop.hurry.wait(), _drain(config))
            return 0
        finally:
            await end([envoy], STOP_S)


async def _until_any(child: Child, *events: Coroutine[Any, Any, object]) -> None:
    """Return when the child has ended or one of the events has come."""
    tasks = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait([child.exited, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _drain(config: Config) -> None:
    admin_url = f"http://{endpoint(reachable(config.envoy.admin_host), config.envoy.admin_port)}"
    timeout_s = config.gateway.drain_timeout_s
    log.info("draining")
    left = await envoy_admin.drain(admin_url, timeout_s, lambda _active: None)
    if left is None:
        log.warning("Envoy's admin interface does not answer: stopping without a drain")
    elif left:
        log.warning("%d requests were still under way after %g s", left, timeout_s)
    else:
        log.info("drained")
