"""`wavegate envoy`: Envoy in the foreground, configured from a wavegate configuration."""

from __future__ import annotations

import asyncio
import logging

import typer

from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, fail, load_resolved, need_free_ports
from gateway.envoy_process import EnvoyError
from gateway.envoy_run import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def envoy(config: ConfigPath = DEFAULT_CONFIG_PATH) -> None:
    """Run Envoy alone, with what `wavegate envoy-config` prints; its logs go to stdout and stderr.

    SIGTERM or Ctrl-C drains: no new requests, and those under way may take gateway.drain_timeout_s. A second
    one stops at once. Supervise it with what supervises your other services; `wavegate up` does so itself.
    """
    loaded = load_resolved(config)
    need_free_ports(loaded, "envoy")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        status = asyncio.run(run(loaded))
    except EnvoyError as error:
        fail(str(error))
    raise typer.Exit(status)
