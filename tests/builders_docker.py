"""Docker for tests: the daemon that runs here, or one of our own that is gone afterwards.

`with running_docker() as docker:`; NoDocker says why there is none.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DAEMON_START_TIMEOUT_S = 60.0
DAEMON_STOP_TIMEOUT_S = 60.0
SHOWN_LOG_LINES = 5
DATA_BYTES = 6 << 30

DAEMON_OPTIONS = (
    "--bridge=none",
    "--iptables=false",
    "--ip6tables=false",
    "--ip-forward=false",
    "--ip-masq=false",
)
"""Containers of one network reach each other, and published ports are reached through a proxy process. What a
daemon else changes in the machine's firewall and routing stays after its end, and is not needed here."""


class NoDocker(Exception):
    """There is no Docker daemon and none can be started; the message says why."""


class CommandFailed(Exception):
    """A command ended with another status than 0; the message has its output."""


class Docker:
    """A daemon, and commands that talk to it."""

    def __init__(self, host: str | None = None) -> None:
        """`host`: the daemon's address; by default the usual one, or what the environment says."""
        self._environment = {} if host is None else {"DOCKER_HOST": host}

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: bytes | int = subprocess.DEVNULL,
        timeout_s: float = 600.0,
    ) -> str:
        """What a command writes to stdout. `stdin`: bytes, or an open file. Raises CommandFailed."""
        with tempfile.TemporaryFile() as given:
            if isinstance(stdin, bytes):
                given.write(stdin)
                given.seek(0)
            finished = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **self._environment, **(environment or {})},
                stdin=given if isinstance(stdin, bytes) else stdin,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        output, errors = finished.stdout.decode(errors="replace"), finished.stderr.decode(errors="replace")
        if finished.returncode != 0:
            shown = f"{output[-4000:]}\n{errors[-4000:]}"
            raise CommandFailed(f"`{' '.join(command)}` ended with {finished.returncode}:\n{shown}")
        return output

    def __call__(
        self, *arguments: str, stdin: bytes | int = subprocess.DEVNULL, timeout_s: float = 600.0
    ) -> str:
        """`docker <arguments>`."""
        return self.run(["docker", *arguments], stdin=stdin, timeout_s=timeout_s)

    def answers(self) -> bool:
        """Whether there is a daemon."""
        try:
            self("version", "--format", "{{.Server.Version}}", timeout_s=20.0)
        except (CommandFailed, OSError, subprocess.TimeoutExpired):
            return False
        return True


def archive(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    """A tar archive: what the daemon takes as the files of a build, or of an image."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def running_docker() -> Iterator[Docker]:
    """The daemon of this machine if one runs, else one that is started for the block. Raises NoDocker."""
    if shutil.which("docker") is None:
        raise NoDocker("there is no docker command here")
    theirs = Docker()
    if theirs.answers():
        yield theirs
        return
    if shutil.which("dockerd") is None:
        raise NoDocker("no Docker daemon runs here, and there is no dockerd to start one")
    if os.geteuid() != 0:
        raise NoDocker("no Docker daemon runs here, and only root can start one")
    with _own_daemon() as docker:
        yield docker


@contextmanager
def _own_daemon() -> Iterator[Docker]:
    # Apart from the data, because the path of a socket must be short.
    run = Path(tempfile.mkdtemp(prefix="wavegate-dockerd-", dir="/tmp"))
    data = Path(tempfile.mkdtemp(prefix="wavegate-dockerd-data-", dir=_data_folder()))
    host = f"unix://{run}/docker.sock"
    places = [f"--host={host}", f"--exec-root={run}/exec", f"--pidfile={run}/pid", f"--data-root={data}"]
    try:
        with (run / "log").open("wb") as log:
            daemon = subprocess.Popen(
                ["dockerd", *DAEMON_OPTIONS, *places], stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield _once_it_answers(daemon, Docker(host), run / "log")
        finally:
            _stop(daemon)
    finally:
        for folder in (run, data):
            _unmount_below(folder)
            shutil.rmtree(folder)


def _data_folder() -> Path:
    """Images take some gigabytes of many small files: in memory, if there is plenty of it."""
    if memory := memory_folder(DATA_BYTES):
        return memory
    ignored = ROOT / ".wavegate"
    ignored.mkdir(exist_ok=True)
    return max((Path(tempfile.gettempdir()), ignored), key=lambda folder: shutil.disk_usage(folder).free)


def memory_folder(needed_bytes: int) -> Path | None:
    """A folder that lies in memory, if so much is free there and twice as much is available to all."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or shutil.disk_usage(folder).free < needed_bytes:
        return None
    available = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return folder if available and int(available[1]) * 1024 >= 2 * needed_bytes else None


def _once_it_answers(daemon: subprocess.Popen[bytes], docker: Docker, log: Path) -> Docker:
    deadline_s = time.monotonic() + DAEMON_START_TIMEOUT_S
    while not docker.answers():
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            last_words = log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
            raise NoDocker("\n".join(["dockerd cannot start here:", *last_words]))
        time.sleep(0.2)
    return docker


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(DAEMON_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _unmount_below(folder: Path) -> None:
    """The daemon leaves the mounts of network namespaces behind."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", path], check=True)
