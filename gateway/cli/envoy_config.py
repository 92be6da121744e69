"""`wavegate envoy-config`: the rendered Envoy configuration, checked by Envoy itself on request."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, fail, load_resolved
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import EnvoyError, locate, validate

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def envoy_config(
    config: ConfigPath = DEFAULT_CONFIG_PATH,
    check: Annotated[
        bool, typer.Option("--check", help="Let Envoy validate it, and print nothing else.")
    ] = False,
) -> None:
    """Print the Envoy configuration that a wavegate configuration asks for.

    It is what `wavegate up` runs; run it elsewhere with `envoy --disable-hot-restart -c FILE`.
    """
    loaded = load_resolved(config)
    text = to_yaml(render(loaded))
    if not check:
        typer.echo(text, nl=False)
        return
    try:
        binary = locate(loaded.envoy.binary)
        validate(binary, text)
    except EnvoyError as error:
        fail(str(error))
    typer.echo(f"{config}: Envoy accepts the configuration ({binary})")
