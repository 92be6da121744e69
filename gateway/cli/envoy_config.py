"""`wavegate envoy-config`: the rendered Envoy configuration, checked by Envoy itself on request."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.choices import one_of, shown
from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, fail, load_resolved
from gateway.envoy_config import render, to_yaml
from gateway.envoy_parts import Part, place_of, render_part
from gateway.envoy_process import EnvoyError, locate, validate

EXPLAINED = "# Rendered by `wavegate envoy-config` for Envoy 1.40; envoy/README.md explains every field."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def envoy_config(
    config: ConfigPath = DEFAULT_CONFIG_PATH,
    check: Annotated[
        bool, typer.Option("--check", help="Let Envoy validate it, and print nothing else.")
    ] = False,
    part: Annotated[
        Part | None,
        typer.Option(
            parser=one_of(Part),
            metavar=shown(Part),
            help="Only this piece, for an Envoy that you already run.",
        ),
    ] = None,
) -> None:
    """Print the Envoy configuration that a wavegate configuration asks for.

    It is what `wavegate up` runs; run it elsewhere with `envoy --disable-hot-restart -c FILE`.
    """
    loaded = load_resolved(config)
    if check:
        try:
            binary = locate(loaded.envoy.binary)
            validate(binary, to_yaml(render(loaded)))
        except EnvoyError as error:
            fail(str(error))
        typer.echo(f"{config}: Envoy accepts the configuration ({binary})")
        return
    typer.echo(EXPLAINED)
    if part is None:
        typer.echo(to_yaml(render(loaded)), nl=False)
    else:
        typer.echo(f"# Place: {place_of(part)}.")
        typer.echo(to_yaml(render_part(loaded, part)), nl=False)
