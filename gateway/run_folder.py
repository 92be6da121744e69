"""The folder of one running deployment: its logs and the configurations its processes were started with.

Must never be shared by two deployments at a time, nor show other users what is in its files. The rights of a
folder that was there before are left to whoever made it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway import private_file

DEFAULT_RUN_FOLDER = Path(".wavegate")


class RunFolderError(Exception):
    """The folder cannot be used; the message says why and what to do."""


class RunFolder:
    """Where the files of a deployment are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "wavegate.yaml"
        self.envoy_config_path = path / "envoy.yaml"

    def write_config(self, text: str) -> None:
        """The configuration that the processes are started with."""
        private_file.write(self.config_path, text)

    def write_envoy_config(self, text: str) -> None:
        """Envoy's configuration."""
        private_file.write(self.envoy_config_path, text)

    def log_path(self, process: str) -> Path:
        """The log of a process: `rank g0/1` writes to `logs/rank-g0-1.log`."""
        return self.path / "logs" / (process.replace(" ", "-").replace("/", "-") + ".log")


@contextmanager
def locked_run_folder(path: Path) -> Iterator[RunFolder]:
    """Create the folder if need be and hold it as long as the block lasts. Raises RunFolderError."""
    try:
        path.mkdir(private_file.FOLDER_MODE, parents=True, exist_ok=True)
        (path / "logs").mkdir(private_file.FOLDER_MODE, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, private_file.FILE_MODE)
    except OSError as error:
        raise RunFolderError(
            f"cannot use {path} for logs: {error.strerror}; choose another with --run-dir"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            raise RunFolderError(
                f"another wavegate (process {owner}) uses {path}; stop it, or choose another with --run-dir"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield RunFolder(path)
    finally:
        os.close(lock)
