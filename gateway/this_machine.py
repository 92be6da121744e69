"""Looks up on this machine what `doctor` wants to know. Must never judge what it finds."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from gateway.config import Config
from gateway.config_groups import VllmGroup
from gateway.deployment import rank_listeners
from gateway.doctor import Reachability
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import EnvoyError, locate, validate
from gateway.ports import port_problems
from vllm_ranks.launcher.model_kind import find_config

COMMAND_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 3.0

_TELL_VERSION = "import importlib.metadata; print(importlib.metadata.version('vllm'))"


class ThisMachine:
    """The machine this process runs on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.platform = sys.platform
        self.open_files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def find_executable(self, name: str) -> Path | None:
        """The file that a command is, by path or on PATH."""
        found = shutil.which(name)
        return None if found is None else Path(found)

    def vllm_version(self, executable: Path) -> str | None:
        """Asked of the interpreter beside the command, which is much quicker than the command itself."""
        for python in (executable.with_name("python"), executable.with_name("python3")):
            if python.exists() and (version := _output(python, "-c", _TELL_VERSION)):
                return version.strip()
        lines = (_output(executable, "--version") or "").split()
        return lines[-1] if lines else None

    def gpu_count(self) -> int | None:
        """As nvidia-smi lists them."""
        listed = _output(Path("nvidia-smi"), "--list-gpus")
        return None if listed is None else len(listed.splitlines())

    def port_problems(self, node: int | None) -> list[str]:
        """Ports of the ranks here, and of gateway and Envoy where they run."""
        listeners = list(self._config.listeners()) if node is None else rank_listeners(self._config, node)
        return port_problems(listeners)

    def reach(self, host: str, port: int) -> Reachability:
        """Try to connect."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
                return Reachability.LISTENS
        except ConnectionRefusedError:
            return Reachability.REFUSED
        except OSError:
            return Reachability.UNREACHABLE

    def files_in(self, folder: Path) -> list[str] | None:
        """Names of the files in a folder."""
        try:
            return [path.name for path in folder.iterdir()]
        except OSError:
            return None

    def cached_model(self, model: str, group: VllmGroup) -> Path | None:
        """The snapshot of a model in the Hugging Face cache."""
        config = find_config(model, {**os.environ, **group.env})
        return None if config is None else config.parent

    def free_bytes(self, path: Path) -> int | None:
        """Space left where a path is."""
        try:
            return shutil.disk_usage(path).free
        except OSError:
            return None

    def envoy_problem(self) -> str | None:
        """Why Envoy cannot be started."""
        try:
            validate(locate(self._config.envoy.binary), to_yaml(render(self._config)))
        except EnvoyError as error:
            return str(error)
        return None


def _output(command: Path, *arguments: str) -> str | None:
    """What a command prints; `None` if it does not run or fails."""
    try:
        finished = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout if finished.returncode == 0 else None
