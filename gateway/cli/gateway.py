"""`wavegate gateway`: the gateway process in the foreground."""

from __future__ import annotations

import logging

import typer

from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, fail, load_resolved, need_free_ports

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def gateway(config: ConfigPath = DEFAULT_CONFIG_PATH) -> None:
    """Run the gateway alone: the ext_proc service that Envoy asks for each request, and the admin API.

    Ends on SIGTERM or Ctrl-C, once the requests under way have ended or gateway.drain_timeout_s is over.
    """
    loaded = load_resolved(config)
    need_free_ports(loaded, "gateway")
    import uvloop

    from gateway.admin_token import AdminTokenError
    from gateway.prompt_tokenizer import TokenizerError
    from gateway.server import run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(run(loaded))
    except (TokenizerError, AdminTokenError) as error:
        fail(f"{config}: {error}", status=2)
    except OSError as error:
        fail(str(error))
