"""The commands that would start the ranks of a configuration, as a shell script for each machine. Pure."""

from __future__ import annotations

import shlex

from gateway.config import Config
from gateway.config_groups import EmbeddedGroup, VllmGroup
from gateway.plan import embedded_rank_arguments
from vllm_ranks.launcher.command import as_shell, rank_commands


def render_commands(config: Config, node: int | None = None) -> str:
    """One line per rank, below a comment that names its machine; of all machines, or of one.

    All lines run at the same time, each as a service of its own: no rank is ready before its whole group is.
    """
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
