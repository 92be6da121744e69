"""What an operator touches: configuration, lifecycle, Envoy rendering, admin API, telemetry and the CLI."""

from importlib.metadata import version

__version__ = version("wavegate")
