"""A configuration becomes a running deployment: check, write, plan, supervise.

The order of start is ranks, gateway, Envoy; the drain before the stop is Envoy's.
"""

from __future__ import annotations

import yaml

from gateway import envoy_admin
from gateway.config import Config
from gateway.config_types import endpoint
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import EnvoyError, locate
from gateway.plan import plan, reachable
from gateway.ports import port_problems
from gateway.progress import Progress
from gateway.run_folder import RunFolder
from gateway.supervisor import Supervisor, Work
from gateway.unit import UnitFailed


class StartFailed(Exception):
    """The deployment did not start, and nothing of it is left running. The message says why."""


async def run_deployment(config: Config, folder: RunFolder, progress: Progress, work: Work) -> None:
    """Start what the configuration asks for, do `work` while it is kept running, drain and stop it.

    Raises:
        StartFailed: a port is taken, Envoy is missing, or a process did not start.
    """
    if problems := port_problems(config.listeners()):
        raise StartFailed("\n".join(problems))
    try:
        planned = plan(config, folder, locate(config.envoy.binary))
        folder.write_config(yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False))
        folder.write_envoy_config(to_yaml(render(config)))
        supervisor = Supervisor(planned.units, folder, progress, lambda: _drain(config, progress))
        await supervisor.run(work)
    except (EnvoyError, UnitFailed) as error:
        raise StartFailed(str(error)) from None


async def _drain(config: Config, progress: Progress) -> None:
    admin_url = f"http://{endpoint(reachable(config.envoy.admin_host), config.envoy.admin_port)}"
    timeout_s = config.gateway.drain_timeout_s
    with progress.step("draining") as step:
        left = await envoy_admin.drain(
            admin_url, timeout_s, lambda active: step.show(f"{active} requests under way")
        )
        step.done(f"{left} requests cut after {timeout_s:g} s" if left else "no request is under way")
