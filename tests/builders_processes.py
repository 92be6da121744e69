"""Small real child processes for tests of the supervisor, and whether processes are gone."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from gateway.plan import ProcessPlan, UnitPlan
from tests.builders_ports import free_port

SERVER = textwrap.dedent(
    """
    import http.server, os, signal, subprocess, sys

    name, port, journal = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    options = dict(option.split("=") for option in sys.argv[4:])

    def write(what, pid=os.getpid()):
        with open(journal, "a") as file:
            file.write(f"{what} {name} {pid}\\n")

    def on_sigterm(*_):
        write("stopped")
        if "stubborn" not in options:
            os._exit(0)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if "unready" in options else 200)
            self.end_headers()

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(500 if "cold" in options else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    signal.signal(signal.SIGTERM, on_sigterm)
    write("started")
    print(f"{name} says hello", flush=True)
    if "offspring" in options:
        write("started", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid)
    if "dies_at_start" in options:
        print(f"{name} cannot go on", file=sys.stderr, flush=True)
        os._exit(3)
    if "says" in options:
        print(options["says"].replace("_", " "), flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
    """
)
"""A process that answers HTTP and keeps a journal of its starts and stops."""


class Journal:
    """What the children wrote about themselves, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, what: str) -> list[str]:
        """Names of the processes that `started` or `stopped`, in order."""
        return [name for kind, name, _pid in self._lines() if kind == what]

    def pids(self, name: str | None = None) -> list[int]:
        """Ids of all processes that ever started, or of those with this name."""
        return [int(pid) for kind, who, pid in self._lines() if kind == "started" and name in (None, who)]

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []


def process(name: str, journal: Journal, **options: object) -> ProcessPlan:
    """A process called `name`; its options are those that SERVER looks for."""
    port = free_port()
    arguments = [name, str(port), str(journal.path), *(f"{key}={value}" for key, value in options.items())]
    return ProcessPlan(name, (sys.executable, "-c", SERVER, *arguments), f"http://127.0.0.1:{port}/")


def unit(
    name: str, *processes: ProcessPlan, ready_timeout_s: float = 30.0, stop_timeout_s: float = 20.0
) -> UnitPlan:
    """A unit of these processes."""
    return UnitPlan(name, processes, f"{name} is up", ready_timeout_s, stop_timeout_s)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie that waits for an indifferent init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def running(pids: Iterable[int]) -> list[int]:
    """Those that still run."""
    return [pid for pid in pids if is_running(pid)]


def running_with(text: str) -> list[int]:
    """All processes of this machine whose command line contains `text`."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in running(found) if text in command_line(pid)]


def command_line(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


async def eventually(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Return as soon as `condition` holds; fail if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)
