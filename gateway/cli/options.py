"""What several sub-commands share: the configuration option, and how errors reach the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gateway.config import Config
from gateway.config_file import DEFAULT_PATH, ConfigError, load
from gateway.config_gateway import GatewaySection
from gateway.config_types import endpoint
from gateway.plan import reachable
from gateway.ports import port_problems
from gateway.prompt_tokenizer import TokenizerError, tokenise_of
from gateway.resolve import Resolved, Unresolved, resolve, resolve_what_can_be

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration, a wavegate.yaml.")
]
DEFAULT_CONFIG_PATH = DEFAULT_PATH

AdminConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Take the admin address from this wavegate.yaml.",
        show_default=f"{DEFAULT_PATH}, if there is one",
    ),
]
AdminUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The gateway's admin API.",
        show_default="that of the configuration, or port 9090",
    ),
]


def load_config(path: Path) -> Config:
    """The configuration, or an explanation on stderr and exit status 2."""
    try:
        return load(path)
    except ConfigError as error:
        fail(str(error), status=2)


def load_resolved(path: Path) -> Config:
    """The configuration with every group as it will run; what had to be found out is told on stderr."""
    return _resolved(path, resolve).config


def load_resolved_where_possible(path: Path) -> Resolved:
    """The same for those who can work with open questions, which are left to them to tell."""
    return _resolved(path, resolve_what_can_be)


def _resolved(path: Path, how: Callable[[Config], Resolved]) -> Resolved:
    try:
        resolved = how(load_config(path))
    except Unresolved as error:
        fail(f"{path}: {error}", status=2)
    for note in resolved.notes:
        typer.echo(note, err=True)
    return resolved


def require_tokenizers(config: Config, path: Path) -> None:
    """Nothing if the tokenizers that the groups name can be used; else the reason, and exit status 2."""
    try:
        tokenise_of(config)
    except TokenizerError as error:
        fail(f"{path}: {error}", status=2)


def need_free_ports(config: Config, section: str) -> None:
    """End with what to change if a port of a section, `envoy` or `gateway`, cannot be listened on."""
    listeners = (one for one in config.listeners() if one.field.startswith(f"{section}."))
    if problems := port_problems(listeners):
        fail("\n".join(problems))


def admin_address(config: Path | None, admin: str | None) -> str:
    """The base URL of the admin API that the options name."""
    if admin is not None:
        return (admin if "://" in admin else f"http://{admin}").rstrip("/")
    if config is None and DEFAULT_PATH.exists():
        config = DEFAULT_PATH
    settings = load_config(config).gateway if config is not None else GatewaySection()
    return f"http://{endpoint(reachable(settings.admin_host), settings.admin_port)}"


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Say on stderr what went wrong and end with `status`."""
    typer.echo(message, err=True)
    raise typer.Exit(status)
