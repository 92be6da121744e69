"""What has to run for a configuration: units of processes, in the order in which they start.

Pure: builds command lines and addresses, starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ext_proc.vocabulary import Rank
from gateway.config import Config
from gateway.config_groups import EmbeddedGroup, VllmGroup
from gateway.config_types import endpoint
from gateway.envoy_process import command as envoy_command
from gateway.run_folder import RunFolder
from vllm_ranks.launcher.command import rank_commands

WAVEGATE = (sys.executable, "-P", "-m", "gateway.cli")
"""The console script's equivalent. -P: the current folder is not searched for modules."""
GUARD = (sys.executable, "-P", "-m", "vllm_ranks.launcher.guard", "--")
"""Runs a vLLM server so that nothing it has started outlives it."""
VLLM_STOP_S = 20.0
"""Nothing is under way any more when vLLM is asked to stop; it is done within seconds, or stuck."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to run."""

    name: str
    command: tuple[str, ...]
    ready_url: str
    """Answers 200 once the process can do its work."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those it inherits."""
    access_log_prefix: str | None = None
    """How lines begin that tell of requests, not of how the process fares."""
    is_vllm: bool = False
    """Whether its log is that of a vLLM server."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What makes a unit a group of ranks: it is taken out of rotation before it is stopped, and warmed up."""

    name: str
    model: str
    ranks: tuple[Rank, ...]
    """Those that run here, in the order of the unit's processes."""
    coordinator_below: str | None = None
    """The process that has vLLM's coordinator among those it starts, if it is one of these."""


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
    group: GroupPlan | None = None
    """`None` for what is no group of ranks."""

    @property
    def is_vllm(self) -> bool:
        """Whether its processes are vLLM servers."""
        return any(process.is_vllm for process in self.processes)


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
    """The units that `wavegate up` runs: of the groups, those whose ranks are all on this machine."""
    return Plan(
        groups=rank_units(config, node=None),
        gateway=_gateway(config, folder),
        envoy=_envoy(config, folder, envoy_binary),
    )


def rank_units(config: Config, node: int | None) -> tuple[UnitPlan, ...]:
    """The ranks of one machine, a unit for each group; adopted groups are somebody else's.

    Args:
        config: with the kind of every model known.
        node: the machine's number among those that groups are spread over. The first of them also runs the
            groups that are not spread; `None`: this machine runs these alone.
    """
    units = []
    for group in config.groups:
        if isinstance(group, EmbeddedGroup) and node in (None, 0):
            units.append(_embedded_group(group))
        elif isinstance(group, VllmGroup) and (here := node_of(group, node)) is not None:
            units.append(_vllm_group(group, here))
    return tuple(units)


def node_of(group: VllmGroup, node: int | None) -> int | None:
    """Which of a group's machines the machine with this number is; `None`: none of them."""
    if group.is_local:
        return 0 if node in (None, 0) else None
    return node if node is not None and node < group.nodes else None


def _embedded_group(group: EmbeddedGroup) -> UnitPlan:
    ranks = group.ranks()
    return UnitPlan(
        name=f"group {group.name}",
        processes=tuple(
            ProcessPlan(
                f"rank {rank.name}", rank_command(group, rank.index), f"http://{rank.endpoint}/health"
            )
            for rank in ranks
        ),
        serves=_serves(ranks),
        ready_timeout_s=120.0,
        stop_timeout_s=10.0,
        group=GroupPlan(group.name, group.model, ranks),
    )


def _vllm_group(group: VllmGroup, node: int) -> UnitPlan:
    commands = [command for command in rank_commands(group.launch()) if command.place.node == node]
    ranks = tuple(group.ranks()[command.place.index] for command in commands)
    return UnitPlan(
        name=f"group {group.name}" + (f" on node {node}" if group.nodes > 1 else ""),
        processes=tuple(
            ProcessPlan(
                f"rank {rank.name}",
                (*GUARD, *command.command),
                f"http://{rank.endpoint}/health",
                environment=command.environment,
                is_vllm=True,
            )
            for rank, command in zip(ranks, commands, strict=True)
        ),
        serves=_serves(ranks),
        ready_timeout_s=group.ready_timeout_s,
        stop_timeout_s=VLLM_STOP_S,
        group=GroupPlan(
            group.name,
            group.model,
            ranks,
            coordinator_below=f"rank {ranks[0].name}" if node == 0 and group.data_parallel_size > 1 else None,
        ),
    )


def _serves(ranks: tuple[Rank, ...]) -> str:
    if len(ranks) == 1:
        return f"1 rank on http://{ranks[0].endpoint}"
    return f"{len(ranks)} ranks on http://{ranks[0].endpoint} to :{ranks[-1].endpoint.rpartition(':')[2]}"


def rank_command(group: EmbeddedGroup, index: int) -> tuple[str, ...]:
    """The command line of one embedded rank."""
    return (*WAVEGATE, "rank", *embedded_rank_arguments(group, index))


def embedded_rank_arguments(group: EmbeddedGroup, index: int) -> tuple[str, ...]:
    """The options of one embedded rank, in the words of `vllm serve`."""
    arguments = ["--model", group.model, "--host", group.host, "--port", str(group.port + index)]
    arguments += ["--max-num-batched-tokens", str(group.max_num_batched_tokens)]
    if group.data_parallel_size > 1:
        arguments += ["--data-parallel-external-lb"]
        arguments += ["--data-parallel-size", str(group.data_parallel_size)]
        arguments += ["--data-parallel-rank", str(index)]
        arguments += ["--data-parallel-address", group.host]
        arguments += ["--data-parallel-rpc-port", str(group.data_parallel_rpc_port)]
    return (*arguments, *group.args, *group.rank_args.get(index, ()))


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
        processes=(ProcessPlan("envoy", tuple(command), f"{admin}/ready", access_log_prefix="{"),),
        serves=f"ready on http://{endpoint(settings.host, settings.port)}",
        ready_timeout_s=60.0,
        stop_timeout_s=10.0,
    )


def reachable(host: str) -> str:
    """The address at which a server on this machine that listens on `host` can be reached from it."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
