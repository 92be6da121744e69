"""The commands that would start the ranks of a configuration: for a shell, Slurm or Kubernetes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.config import Config
from gateway.config_groups import EmbeddedGroup, VllmGroup
from gateway.kubernetes import manifest
from gateway.plan import embedded_rank_arguments
from vllm_ranks.launcher.command import RankCommand, as_shell, rank_commands

ADDRESS_OF_NODE = "getent ahostsv4 {name} | awk 'NR == 1 {{ print $1 }}'"


class CommandFormat(StrEnum):
    """How commands are written down."""

    SHELL = "shell"
    """One line per rank, by machine."""
    SLURM = "slurm"
    """A batch script; the job's machines take the place of those in the configuration."""
    KUBERNETES = "kubernetes"
    """A StatefulSet whose pods take the place of the machines in the configuration."""


class NothingToWrite(Exception):
    """There are no ranks that this format is for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks of one machine."""

    host: str
    commands: tuple[RankCommand, ...]

    @property
    def devices(self) -> int:
        """How many devices they use."""
        return len({device for command in self.commands for device in command.place.devices})


def render_commands(config: Config, node: int | None, as_format: CommandFormat) -> str:
    """The commands of all machines, or in shell format of one. Raises NothingToWrite."""
    if as_format is CommandFormat.SHELL:
        return _shell(config, node)
    machines = _machines(config)
    name = next((group.name for group in config.groups if isinstance(group, VllmGroup)), "")
    if not machines:
        raise NothingToWrite(f"{as_format.value} is for ranks of engine vllm, and there are none")
    if as_format is CommandFormat.SLURM:
        return _slurm(name, machines)
    return _kubernetes(name, machines)


def _shell(config: Config, node: int | None) -> str:
    """All lines run at the same time, each as a service of its own: no rank is ready before its group."""
    sections: dict[tuple[int, str], list[str]] = {}
    for group in config.groups:
        if isinstance(group, EmbeddedGroup):
            lines = sections.setdefault((0, group.host), [])
            for rank in group.ranks():
                lines.append(shlex.join(["wavegate", "rank", *embedded_rank_arguments(group, rank.index)]))
        elif isinstance(group, VllmGroup):
            for command in rank_commands(group.launch()):
                place = command.place
                sections.setdefault((place.node, place.host), []).append(as_shell([command]))
    chosen = {key: lines for key, lines in sections.items() if node is None or key[0] == node}
    texts = [
        f"# node {number}, {host}\n" + "".join(f"{line}\n" for line in lines)
        for (number, host), lines in sorted(chosen.items())
    ]
    return "\n".join(texts)


def _machines(config: Config) -> list[Machine]:
    by_node: dict[int, list[RankCommand]] = {}
    for group in config.groups:
        if isinstance(group, VllmGroup):
            for command in rank_commands(group.launch()):
                by_node.setdefault(command.place.node, []).append(command)
    return [Machine(commands[0].place.host, tuple(commands)) for _, commands in sorted(by_node.items())]


def _slurm(name: str, machines: list[Machine]) -> str:
    variables = {machine.host: f"NODE_{node}" for node, machine in enumerate(machines)}
    addresses = "\n".join(
        f"export NODE_{node}=$({ADDRESS_OF_NODE.format(name=f'${{nodes[{node}]}}')})"
        for node in range(len(machines))
    )
    ranks = " ".join(
        f"$NODE_{node}:{command.place.port}"
        for node, machine in enumerate(machines)
        for command in machine.commands
    )
    gpus = f"#SBATCH --gpus-per-node={machines[0].devices}\n" if machines[0].devices else ""
    return f"""\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={len(machines)}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
set -eu
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
{addresses}
echo "endpoints: {ranks}"
# A group is one failure domain: the first rank that ends ends the step.
srun --kill-on-bad-exit=1 bash <<'RANKS'
{_script("SLURM_NODEID", machines, [variables] * len(machines))}
RANKS
"""


def _kubernetes(name: str, machines: list[Machine]) -> str:
    first = machines[0].host
    # On its own machine a rank has the pod's address; rank 0's is looked up by its name.
    variables = [
        {first: "NODE_0", machine.host: "POD_IP"} if machine.host != first else {first: "POD_IP"}
        for machine in machines
    ]
    lookup = ADDRESS_OF_NODE.format(name=f"{name}-0.{name}")
    wait = f'until NODE_0=$({lookup}) && [ -n "$NODE_0" ]; do sleep 1; done\n' if len(machines) > 1 else ""
    script = f"{wait}NODE=${{HOSTNAME##*-}}\n{_script('NODE', machines, variables)}\n"
    ports = [command.place.port for command in machines[0].commands]
    return manifest(name, replicas=len(machines), gpus=machines[0].devices, ports=ports, script=script)


def _script(node_variable: str, machines: list[Machine], variables: Sequence[Mapping[str, str]]) -> str:
    """Runs the ranks of the machine it runs on, and ends when one of them does."""
    cases = []
    for node, machine in enumerate(machines):
        lines = "".join(f"  {_line(command, variables[node])} &\n" for command in machine.commands)
        cases.append(f"{node})\n{lines}  ;;\n")
    return f"case ${node_variable} in\n{''.join(cases)}esac\nwait -n\nexit 1"


def _line(command: RankCommand, variables: Mapping[str, str]) -> str:
    """A command in which variables stand for addresses."""
    assignments = [f"{name}={_word(value, variables)}" for name, value in command.environment.items()]
    return " ".join([*assignments, *(_word(word, variables) for word in command.command)])


def _word(word: str, variables: Mapping[str, str]) -> str:
    addresses = "|".join(re.escape(address) for address in variables)
    parts = re.split(rf"(?<![\d.])({addresses})(?![\d.])", word)
    if len(parts) == 1:
        return shlex.quote(word)
    # Every second part is an address.
    quoted = (
        f"${{{variables[part]}}}" if position % 2 else re.sub(r'([\\"$`])', r"\\\1", part)
        for position, part in enumerate(parts)
    )
    return f'"{"".join(quoted)}"'
