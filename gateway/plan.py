"""What has to run for a configuration: units of processes, in the order in which they start.

Pure: builds command lines and addresses, starts nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gateway.config import Config
from gateway.config_groups import EmbeddedGroup
from gateway.config_types import endpoint
from gateway.envoy_process import command as envoy_command
from gateway.run_folder import RunFolder

WAVEGATE = (sys.executable, "-P", "-m", "gateway.cli")
"""The console script's equivalent. -P: the current folder is not searched for modules."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to run."""

    name: str
    command: tuple[str, ...]
    ready_url: str
    """Answers 200 once the process can do its work."""


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Processes that live and die together: one failure domain."""

    name: str
    processes: tuple[ProcessPlan, ...]
    serves: str
    """What it is and where it can be reached, for people."""
    ready_timeout_s: float
    stop_timeout_s: float
    """From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All units of a deployment."""

    groups: tuple[UnitPlan, ...]
    gateway: UnitPlan
    envoy: UnitPlan

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """In the order of start; the reverse is the order of stop."""
        return (*self.groups, self.gateway, self.envoy)


def plan(config: Config, folder: RunFolder, envoy_binary: Path) -> Plan:
    """The units that `wavegate up` runs; adopted groups are somebody else's."""
    return Plan(
        groups=tuple(_embedded_group(group) for group in config.groups if isinstance(group, EmbeddedGroup)),
        gateway=_gateway(config, folder),
        envoy=_envoy(config, folder, envoy_binary),
    )


def _embedded_group(group: EmbeddedGroup) -> UnitPlan:
    last = group.port + group.data_parallel_size - 1
    ranks = group.ranks()
    return UnitPlan(
        name=f"group {group.name}",
        processes=tuple(
            ProcessPlan(
                f"rank {rank.name}", rank_command(group, rank.index), f"http://{rank.endpoint}/health"
            )
            for rank in ranks
        ),
        serves=f"{len(ranks)} ranks on http://{ranks[0].endpoint} to :{last}"
        if len(ranks) > 1
        else f"1 rank on http://{ranks[0].endpoint}",
        ready_timeout_s=120.0,
        stop_timeout_s=10.0,
    )


def rank_command(group: EmbeddedGroup, index: int) -> tuple[str, ...]:
    """The command line of one embedded rank, in the words of `vllm serve`."""
    arguments = ["--model", group.model, "--host", group.host, "--port", str(group.port + index)]
    arguments += ["--max-num-batched-tokens", str(group.max_num_batched_tokens)]
    if group.data_parallel_size > 1:
        arguments += ["--data-parallel-external-lb"]
        arguments += ["--data-parallel-size", str(group.data_parallel_size)]
        arguments += ["--data-parallel-rank", str(index)]
        arguments += ["--data-parallel-address", group.host]
        arguments += ["--data-parallel-rpc-port", str(group.data_parallel_rpc_port)]
    return (*WAVEGATE, "rank", *arguments, *group.args, *group.rank_args.get(index, ()))


def _gateway(config: Config, folder: RunFolder) -> UnitPlan:
    settings = config.gateway
    admin = f"http://{endpoint(reachable(settings.admin_host), settings.admin_port)}"
    return UnitPlan(
        name="gateway",
        processes=(
            ProcessPlan("gateway", (*WAVEGATE, "gateway", "-c", str(folder.config_path)), f"{admin}/readyz"),
        ),
        serves=f"admin {admin}, ext_proc {settings.ext_proc_listen}",
        ready_timeout_s=60.0,
        stop_timeout_s=settings.drain_timeout_s + 5.0,
    )


def _envoy(config: Config, folder: RunFolder, binary: Path) -> UnitPlan:
    settings = config.envoy
    admin = f"http://{endpoint(reachable(settings.admin_host), settings.admin_port)}"
    command = envoy_command(binary, folder.envoy_config_path, worker_threads=settings.worker_threads)
    return UnitPlan(
        name="Envoy",
        processes=(ProcessPlan("envoy", tuple(command), f"{admin}/ready"),),
        serves=f"ready on http://{endpoint(settings.host, settings.port)}",
        ready_timeout_s=60.0,
        stop_timeout_s=10.0,
    )


def reachable(host: str) -> str:
    """The address at which a server on this machine that listens on `host` can be reached from it."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
