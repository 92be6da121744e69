"""The command line and environment of every rank of a group of real vLLM servers. Pure.

Flags as in vLLM 0.32 (vllm/engine/arg_utils.py). A lock-step group runs in external load-balancer mode: rank
0 holds the coordinator, every rank has its own HTTP port. A group of one rank is an ordinary server: vLLM
refuses external mode for data-parallel size 1, and for models without experts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

OWN_OPTIONS = frozenset(
    {
        "--model",
        "--host",
        "--port",
        "--served-model-name",
        "--tensor-parallel-size",
        "-tp",
        "--pipeline-parallel-size",
        "-pp",
        "--kv-events-config",
        "--max-num-batched-tokens",
        "--data-parallel-size",
        "-dp",
        "--data-parallel-rank",
        "-dpn",
        "--data-parallel-start-rank",
        "-dpr",
        "--data-parallel-size-local",
        "-dpl",
        "--data-parallel-address",
        "-dpa",
        "--data-parallel-rpc-port",
        "-dpp",
        "--data-parallel-backend",
        "-dpb",
        "--data-parallel-hybrid-lb",
        "-dph",
        "--data-parallel-external-lb",
        "-dpe",
        "--data-parallel-multi-port-external-lb",
        "-dpm",
        "--headless",
        "--api-server-count",
        "-asc",
        "--nnodes",
        "--node-rank",
        "--uds",
    }
)
"""Options that decide what the launcher decides: in a group's own arguments they would contradict it."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    index: int
    """Data-parallel rank within the group."""
    node: int
    """Which of the group's machines, from 0."""
    host: str
    port: int
    devices: tuple[str, ...]
    """Devices that only this rank sees; empty: all there are."""


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Where ranks publish what their prefix caches hold."""

    port: int
    """Rank i publishes on port + i …"""
    replay_port: int
    """… and sends again what somebody missed on replay_port + i."""


@dataclass(frozen=True, slots=True)
class GroupLaunch:
    """Everything that the command lines of one group depend on."""

    executable: str
    """The `vllm` command."""
    model: str
    """What is served: a folder, or a name on the Hugging Face hub."""
    served_model_name: str
    """What clients ask for."""
    places: tuple[RankPlace, ...]
    address: str
    """Where the other ranks find rank 0."""
    rpc_port: int
    tensor_parallel_size: int = 1
    device_variable: str = "CUDA_VISIBLE_DEVICES"
    max_num_batched_tokens: int | None = None
    """Token budget of a step; `None`: vLLM's default."""
    kv_events: KvEvents | None = None
    args: tuple[str, ...] = ()
    """More options, for every rank."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, for every rank."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """How one rank is started."""

    place: RankPlace
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables it needs beside those it inherits."""


def rank_commands(launch: GroupLaunch) -> tuple[RankCommand, ...]:
    """The commands of all ranks, in order of rank."""
    return tuple(
        RankCommand(place, _command(launch, place), _environment(launch, place)) for place in launch.places
    )


def _command(launch: GroupLaunch, place: RankPlace) -> tuple[str, ...]:
    size = len(launch.places)
    command = [launch.executable, "serve", launch.model]
    if launch.served_model_name != launch.model:
        command += ["--served-model-name", launch.served_model_name]
    command += ["--host", place.host, "--port", str(place.port)]
    if size > 1:
        command += ["--data-parallel-size", str(size)]
        command += ["--data-parallel-rank", str(place.index), "--data-parallel-external-lb"]
        command += ["--data-parallel-address", launch.address]
        command += ["--data-parallel-rpc-port", str(launch.rpc_port)]
    if launch.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(launch.tensor_parallel_size)]
    if launch.max_num_batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(launch.max_num_batched_tokens)]
    if launch.kv_events is not None:
        command += ["--kv-events-config", _kv_events_config(launch.kv_events, place.host)]
    return (*command, *launch.args)


def _kv_events_config(events: KvEvents, host: str) -> str:
    """vLLM adds the rank to both ports itself (vllm/distributed/kv_events.py, offset_endpoint_port)."""
    # vLLM listens only where the address has a `*` or `::`, else it connects: an IPv4 address written as an
    # IPv6 one is listened on without opening the port to every network.
    publisher = "*" if ":" in host else f"[::ffff:{host}]"
    replayer = "*" if ":" in host else host
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{publisher}:{events.port}",
            "replay_endpoint": f"tcp://{replayer}:{events.replay_port}",
        },
        separators=(",", ":"),
    )


def _environment(launch: GroupLaunch, place: RankPlace) -> dict[str, str]:
    own = {launch.device_variable: ",".join(place.devices)} if place.devices else {}
    return {**own, **launch.environment}


def as_shell(commands: Iterable[RankCommand]) -> str:
    """The commands as lines for a shell, each with its environment before it."""
    return "\n".join(_shell_line(command.environment, command.command) for command in commands)


def _shell_line(environment: Mapping[str, str], command: Sequence[str]) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*variables, shlex.join(command)])


def contradictions(args: Iterable[str]) -> list[str]:
    """Those of a group's own arguments that the launcher decides itself, as they were written."""
    return [arg for arg in args if arg.partition("=")[0].replace("_", "-") in OWN_OPTIONS]
