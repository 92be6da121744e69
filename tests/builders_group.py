"""Real embedded ranks for tests: started as a user starts them, ended by their process id, nothing left.

with group(2, "--time-scale", "10") as ranks:
    ranks[0].post("/v1/completions", {"prompt": "hi"})
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from tests.builders_ports import free_port

START_LIMIT_S = 30.0
FAST = ("--time-scale", "10")
"""Steps of 2 ms instead of 20."""


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Whether a condition comes true before the limit."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def descendants(pid: int) -> dict[int, str]:
    """All processes below `pid`, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    frontier = [pid]
    while frontier:
        parent = frontier.pop()
        for child, its_parent in parents.items():
            if its_parent == parent and child not in found:
                try:
                    found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
                frontier.append(child)
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class RankProcess:
    """One `wavegate rank`."""

    def __init__(self, port: int, options: Sequence[str], log: IO[bytes]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli.rank", "--port", str(port), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    @property
    def log(self) -> str:
        """Everything it and its children have logged."""
        return Path(self._log.name).read_text()

    def children(self, part: str = "") -> list[int]:
        """Processes below it whose command line contains `part`."""
        return [pid for pid, command in descendants(self.process.pid).items() if part in command]

    @property
    def engines(self) -> list[int]:
        """Its engine-core processes."""
        return self.children("engine_process")

    @property
    def coordinators(self) -> list[int]:
        """Its coordinator process, if it has one."""
        return self.children("engine.coordinator")

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer; raises OSError if nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path: str) -> bytes:
        """The body of a GET that must succeed."""
        status, _, body = self.request("GET", path)
        assert status == 200, (path, status, body)
        return body

    def post(self, path: str, body: Any, **options: Any) -> Any:
        """The JSON answer to a POST that must succeed."""
        status, _, answer = self.request("POST", path, body, **options)
        assert status == 200, (path, status, answer)
        return json.loads(answer)

    def complete(self, prompt: Any = "hello", **fields: Any) -> Any:
        """One completion that is not streamed."""
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, **fields})

    def fault(self, fault: str, **details: Any) -> None:
        """Switch a fault."""
        self.post("/fault_injection", {"fault": fault, **details})

    def health(self) -> int | None:
        """Status of /health; `None` if the connection is refused."""
        try:
            return self.request("GET", "/health")[0]
        except OSError:
            return None

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series, summed over those whose labels match."""
        total, found = 0.0, False
        for line in self.get("/metrics").decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total, found = total + float(value), True
        assert found, f"no series {name} {labels}"
        return total

    def wait(self, limit_s: float = 20.0) -> int:
        """Exit code; fails the test if the process does not end."""
        return self.process.wait(limit_s)

    def end(self) -> None:
        """Stop it and everything below it, whatever state they are in."""
        below = descendants(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in below:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def rank(*options: str, wait: bool = True) -> Iterator[RankProcess]:
    """One process with these options; `wait`: until it answers."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        started = RankProcess(free_port(), options, log)  # type: ignore[arg-type]
        try:
            if wait:
                wait_until_serving([started])
            yield started
        finally:
            started.end()


@contextmanager
def group(
    size: int, *options: str, wait: bool = True, **by_rank: Sequence[str]
) -> Iterator[list[RankProcess]]:
    """A group in external mode; `rank1=("--slowdown", "8")` gives one rank further options."""
    rpc_port = str(free_port())
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                rank(
                    *("--data-parallel-size", str(size), "--data-parallel-rank", str(index)),
                    *("--data-parallel-rpc-port", rpc_port),
                    *options,
                    *by_rank.get(f"rank{index}", ()),
                    wait=False,
                )
            )
            for index in range(size)
        ]
        if wait:
            wait_until_serving(ranks)
        yield ranks


def wait_until_serving(ranks: Sequence[RankProcess]) -> None:
    """Until every rank's /health is 200; shows the logs of one that is not."""
    for started in ranks:
        ready = eventually(lambda r=started: r.health() == 200 or r.process.poll() is not None, START_LIMIT_S)  # type: ignore[misc]
        assert ready, f"not ready in time:\n{started.log}"
        assert started.process.poll() is None, f"ended while starting:\n{started.log}"
