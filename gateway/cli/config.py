"""`wavegate config`: check, show, schema."""

from __future__ import annotations

import json

import typer
import yaml

from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, load_config, require_tokenizers
from gateway.config import Config

app = typer.Typer(
    help="Check a configuration, show it with its defaults, or print its JSON Schema.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def check(config: ConfigPath = DEFAULT_CONFIG_PATH) -> None:
    """Validate a file. Each problem is named by line and key, with what would be right; exit status 2."""
    loaded = load_config(config)
    require_tokenizers(loaded, config)
    groups, ranks = len(loaded.groups), len(loaded.ranks())
    typer.echo(f"{config}: fine: {_count(groups, 'group')}, {_count(ranks, 'rank')}")


@app.command()
def show(config: ConfigPath = DEFAULT_CONFIG_PATH) -> None:
    """Print the configuration as wavegate sees it, all defaults filled in."""
    data = load_config(config).model_dump(mode="json", by_alias=True)
    typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors that complete and check YAML."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
