"""Makes the help of commands fit any terminal: typer shows paragraphs with the line ends of the source.

Must never load what only some sub-commands need.
"""

from __future__ import annotations

import inspect
from typing import Protocol

from typer.core import TyperGroup

KEEPS_ITS_LINES = "\b\n"
"""Begins a paragraph, such as a table, whose line ends are meant."""


class HasHelp(Protocol):
    """A command."""

    help: str | None


def fold_help(command: HasHelp) -> None:
    """Make each paragraph of the help of a command, and of its sub-commands, one line."""
    if command.help is not None:
        command.help = folded(command.help)
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            fold_help(inner)


def folded(text: str) -> str:
    """Paragraphs of one line each, but for those that begin with a line `\\b`, without that line."""
    return "\n\n".join(
        paragraph.removeprefix(KEEPS_ITS_LINES)
        if paragraph.startswith(KEEPS_ITS_LINES)
        else paragraph.replace("\n", " ")
        for paragraph in inspect.cleandoc(text).split("\n\n")
    )
