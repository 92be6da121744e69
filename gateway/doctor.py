"""What stands in the way of a launch on this machine, and what to do about it.

Each check is a function from the configuration and a machine to findings. Looks nothing up itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from gateway.config import Config
from gateway.config_groups import VllmGroup
from gateway.plan import node_of
from gateway.resolve import OpenQuestion

TESTED_VLLM = "0.32"
ENOUGH_SHM_BYTES = 1 << 30
ENOUGH_FILES = 65_535


class Level(StrEnum):
    """How much a finding matters."""

    FINE = "fine"
    ADVICE = "advice"
    """It may work, but worse or not always."""
    PROBLEM = "problem"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    text: str
    remedy: str = ""
    """What to do about it."""


class Reachability(StrEnum):
    """What became of an attempt to connect."""

    LISTENS = "listens"
    REFUSED = "refused"
    """The machine is there, and nobody listens yet."""
    UNREACHABLE = "unreachable"


class Machine(Protocol):
    """What can be looked up on a machine."""

    platform: str
    """As `sys.platform`."""
    open_files_limit: int
    """Soft limit of this process; children inherit it."""

    def find_executable(self, name: str) -> Path | None:
        """The file that a command is, by path or on PATH."""
        ...

    def vllm_version(self, executable: Path) -> str | None:
        """The version of vLLM that a `vllm` command belongs to; `None` if it cannot be told."""
        ...

    def gpu_count(self) -> int | None:
        """GPUs that are visible; `None` if there is no driver to ask."""
        ...

    def port_problems(self, node: int | None) -> list[str]:
        """Ports of the ranks that cannot be listened on, a line each."""
        ...

    def reach(self, host: str, port: int) -> Reachability:
        """Try to connect."""
        ...

    def files_in(self, folder: Path) -> list[str] | None:
        """Names of the files in a folder; `None` if there is no such folder."""
        ...

    def cached_model(self, model: str, group: VllmGroup) -> Path | None:
        """The snapshot of a model in the Hugging Face cache of a group's ranks."""
        ...

    def free_bytes(self, path: Path) -> int | None:
        """Space left where a path is; `None` if it cannot be told."""
        ...

    def envoy_problem(self) -> str | None:
        """Why Envoy cannot be started."""
        ...


Check = Callable[[Config, int | None, Machine], Iterator[Finding]]


def examine(
    config: Config, node: int | None, machine: Machine, open_questions: Sequence[OpenQuestion] = ()
) -> list[Finding]:
    """All findings, in the order in which they would stop a launch.

    Args:
        config: with the kind of every model known, but for the open questions.
        node: which of the machines of spread groups this is; `None`: the one that runs gateway and Envoy.
        machine: this one.
        open_questions: what a launch would need to know and could not find out.
    """
    checks: tuple[Check, ...] = (
        _platform,
        _vllm,
        _gpus,
        _models,
        _ports,
        _rank_0,
        _shared_memory,
        _files,
        _envoy,
    )
    return [
        *(Finding(Level.PROBLEM, one.field, one.question, one.remedy) for one in open_questions),
        *(finding for check in checks for finding in check(config, node, machine)),
    ]


def _groups_here(config: Config, node: int | None) -> list[tuple[str, VllmGroup, int]]:
    """Key path, group and its node number here, of the groups of real ranks that run on this machine."""
    found = []
    for position, group in enumerate(config.groups):
        if isinstance(group, VllmGroup) and (here := node_of(group, node)) is not None:
            found.append((f"groups[{position}]", group, here))
    return found


def _platform(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    if _groups_here(config, node) and machine.platform != "linux":
        yield Finding(
            Level.PROBLEM,
            "system",
            f"vLLM ranks are supervised on Linux only, and this is {machine.platform}",
        )


def _vllm(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    seen: set[str] = set()
    for path, group, _ in _groups_here(config, node):
        if group.executable in seen:
            continue
        seen.add(group.executable)
        executable = machine.find_executable(group.executable)
        if executable is None:
            yield Finding(
                Level.PROBLEM,
                "vLLM",
                f"there is no command {group.executable}",
                f"install vLLM into an environment of its own and name its command in {path}.executable",
            )
            continue
        version = machine.vllm_version(executable)
        if version is None:
            yield Finding(
                Level.PROBLEM,
                "vLLM",
                f"{executable} does not tell its version",
                f"try `{executable} --version`",
            )
        elif not re.match(rf"{re.escape(TESTED_VLLM)}(\.|$)", version):
            yield Finding(
                Level.ADVICE,
                "vLLM",
                f"{executable} is version {version}",
                f"wavegate is tested with {TESTED_VLLM}; elsewhere options or metrics may have other names",
            )
        else:
            yield Finding(Level.FINE, "vLLM", f"{executable} is version {version}")


def _gpus(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    groups = [(path, group) for path, group, _ in _groups_here(config, node) if group.devices != ()]
    if not groups:
        return
    named = {device for _, group in groups for device in group.devices or ()}
    counted = sum(g.ranks_per_node * g.tensor_parallel_size for _, g in groups if g.devices is None)
    needed = len(named) + counted
    count = machine.gpu_count()
    paths = ", ".join(path for path, _ in groups)
    if count is None:
        yield Finding(
            Level.PROBLEM,
            "GPUs",
            f"{needed} are needed, and nvidia-smi does not run here",
            f"install the driver; or, where the ranks run on CPUs, write devices: [] ({paths})",
        )
    elif count < needed:
        yield Finding(
            Level.PROBLEM,
            "GPUs",
            f"{count} found, {needed} needed (ranks of a machine × tensor_parallel_size)",
            f"use fewer ranks or a smaller tensor_parallel_size, or spread the ranks over machines ({paths})",
        )
    else:
        yield Finding(Level.FINE, "GPUs", f"{count} found, {needed} needed")
    if sum(group.devices is None for _, group in groups) > 1:
        yield Finding(
            Level.PROBLEM,
            "GPUs",
            "several groups count their devices from 0, so they would share them",
            f"give each its own with devices: [0, 1, …] ({paths})",
        )


def _models(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    for path, group, _ in _groups_here(config, node):
        folder = Path(group.served)
        if folder.is_absolute() or machine.files_in(folder) is not None:
            yield from _model_folder(path, group, folder, machine)
            continue
        snapshot = machine.cached_model(group.served, group)
        if snapshot is not None:
            yield Finding(Level.FINE, "model", f"{group.served} is in the Hugging Face cache")
        elif group.env.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            yield Finding(
                Level.PROBLEM,
                "model",
                f"{group.served} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set",
                f"download it first: hf download {group.served}; or take HF_HUB_OFFLINE out of {path}.env",
            )
        else:
            yield Finding(
                Level.ADVICE,
                "model",
                f"{group.served} is not in the Hugging Face cache: the first start will download it",
                f"download it once beforehand, so that the ranks do not compete: hf download {group.served}",
            )


def _model_folder(path: str, group: VllmGroup, folder: Path, machine: Machine) -> Iterator[Finding]:
    files = machine.files_in(folder)
    if files is None or "config.json" not in files:
        missing = "there is no such folder" if files is None else "it has no config.json"
        yield Finding(Level.PROBLEM, "model", f"{folder}: {missing}", f"correct {path}.model_path")
        return
    made_up = any(re.fullmatch(r"(--load-format=)?dummy", argument) for argument in group.args)
    if not made_up and not any(name.endswith((".safetensors", ".bin", ".pt", ".gguf")) for name in files):
        yield Finding(
            Level.PROBLEM,
            "model",
            f"{folder} has a config.json but no weights",
            "complete the download; or, to try things out, add --load-format=dummy to the group's args",
        )
        return
    yield Finding(Level.FINE, "model", f"{folder} is complete, as far as names tell")


def _ports(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    problems = machine.port_problems(node)
    for problem in problems:
        yield Finding(Level.PROBLEM, "ports", problem)
    if not problems:
        yield Finding(Level.FINE, "ports", "all are free")


def _rank_0(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    """The other machines must reach rank 0 on the handshake's port, and on ports chosen at random."""
    for path, group, here in _groups_here(config, node):
        if here == 0 or group.nodes == 1:
            continue
        address, port = group.launch().address, group.data_parallel_rpc_port
        reached = machine.reach(address, port)
        if reached is Reachability.UNREACHABLE:
            yield Finding(
                Level.PROBLEM,
                "rank 0",
                f"{address} port {port} cannot be reached from here",
                f"open that port and the ephemeral ports between the machines, or correct "
                f"{path}.data_parallel_address: vLLM's coordinator and collectives choose ports at random",
            )
        else:
            how = "listens" if reached is Reachability.LISTENS else "is reachable; nobody listens there yet"
            yield Finding(Level.FINE, "rank 0", f"{address} port {port} {how}")


def _shared_memory(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    if not _groups_here(config, node):
        return
    free = machine.free_bytes(Path("/dev/shm"))
    if free is not None and free < ENOUGH_SHM_BYTES:
        yield Finding(
            Level.ADVICE,
            "shared memory",
            f"/dev/shm has {free >> 20} MiB left; vLLM's processes and NCCL exchange data there",
            "in a container: --ipc=host or --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)",
        )
    elif free is not None:
        yield Finding(Level.FINE, "shared memory", f"/dev/shm has {free >> 20} MiB left")


def _files(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    if machine.open_files_limit < ENOUGH_FILES:
        yield Finding(
            Level.ADVICE,
            "open files",
            f"at most {machine.open_files_limit} at a time; every stream takes one here and one in its rank",
            f"ulimit -n {ENOUGH_FILES} (systemd: LimitNOFILE={ENOUGH_FILES})",
        )
    else:
        yield Finding(Level.FINE, "open files", f"at most {machine.open_files_limit} at a time")


def _envoy(config: Config, node: int | None, machine: Machine) -> Iterator[Finding]:
    if node not in (None, 0):
        return
    problem = machine.envoy_problem()
    if problem is None:
        yield Finding(Level.FINE, "Envoy", "found, and it accepts the configuration")
    else:
        yield Finding(Level.PROBLEM, "Envoy", problem)
