"""The guard of a server: nothing that the server has started survives, however it, or its parents, end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders_processes import running

LIMIT_S = 20.0

SERVER = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time

    journal, how = sys.argv[1], sys.argv[2]
    SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
    PARENT = [sys.executable, "-c",
        "import subprocess, sys, time; child = subprocess.Popen(sys.argv[1:]);"
        "print(child.pid, flush=True); time.sleep(300)", *SLEEP]

    child = subprocess.Popen(PARENT, stdout=subprocess.PIPE, text=True)
    loner = subprocess.Popen(SLEEP, start_new_session=True)
    pids = [os.getpid(), child.pid, int(child.stdout.readline()), loner.pid]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with open(journal + ".new", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(journal + ".new", journal)
    if how == "exits":
        os._exit(5)
    time.sleep(300)
    """
)
"""A server with a child, a grandchild, and a child in a session of its own."""

LAUNCHER = textwrap.dedent(
    """
    import subprocess, sys, time
    guard = subprocess.Popen([sys.executable, "-m", "vllm_ranks.launcher.guard", "--", *sys.argv[1:]])
    time.sleep(300)
    """
)


class Guarded:
    """A guard and its server."""

    def __init__(self, process: subprocess.Popen[bytes], journal: Path) -> None:
        self.process = process
        self._journal = journal

    def pids(self) -> list[int]:
        """The server and all it has started, as soon as they run."""
        assert eventually(self._journal.exists)
        return [int(pid) for pid in self._journal.read_text().split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    """Starts a guarded server that `waits` or `exits`, directly or below a launcher."""
    started: list[Guarded] = []

    def run(how: str = "waits", *, below_launcher: bool = False) -> Guarded:
        journal = tmp_path / "journal"
        server = [sys.executable, "-c", SERVER, str(journal), how]
        guard = [sys.executable, "-m", "vllm_ranks.launcher.guard", "--"]
        command = [sys.executable, "-c", LAUNCHER] if below_launcher else guard
        process = subprocess.Popen([*command, *server], start_new_session=True, stderr=subprocess.DEVNULL)
        started.append(Guarded(process, journal))
        return started[-1]

    yield run
    for guarded in started:
        guarded.process.kill()
        guarded.process.wait()
        for pid in running(guarded.pids()):
            os.kill(pid, signal.SIGKILL)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true before the limit."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def test_what_an_exiting_server_leaves_behind_is_killed(start: Callable[..., Guarded]) -> None:
    guarded = start("exits")
    assert guarded.process.wait(LIMIT_S) == 5
    assert running(guarded.pids()) == []


def test_what_a_killed_server_leaves_behind_is_killed(start: Callable[..., Guarded]) -> None:
    guarded = start()
    os.kill(guarded.pids()[0], signal.SIGKILL)
    assert guarded.process.wait(LIMIT_S) == -signal.SIGKILL
    assert running(guarded.pids()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_server(start: Callable[..., Guarded], number: signal.Signals) -> None:
    guarded = start()
    pids = guarded.pids()
    guarded.process.send_signal(number)
    ended_by_itself = number is signal.SIGTERM
    expected = (
        0 if ended_by_itself else {signal.SIGINT: -signal.SIGINT, signal.SIGHUP: -signal.SIGHUP}[number]
    )
    assert guarded.process.wait(LIMIT_S) == expected
    assert running(pids) == []


def test_when_the_guards_parent_is_killed_everything_goes(start: Callable[..., Guarded]) -> None:
    launcher = start(below_launcher=True)
    pids = launcher.pids()
    assert running(pids) == pids
    launcher.process.kill()
    assert eventually(lambda: running(pids) == [])


def test_when_the_guard_is_killed_its_server_goes_with_it(start: Callable[..., Guarded]) -> None:
    guarded = start()
    server = guarded.pids()[0]
    guarded.process.kill()
    assert eventually(lambda: running([server]) == [])


def test_stopped_processes_are_killed_too(start: Callable[..., Guarded]) -> None:
    guarded = start()
    for pid in guarded.pids():
        os.kill(pid, signal.SIGSTOP)
    os.kill(guarded.pids()[0], signal.SIGKILL)
    guarded.process.wait(LIMIT_S)
    assert running(guarded.pids()) == []


def test_a_missing_command_is_named() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "vllm_ranks.launcher.guard", "--", "/no/such/vllm"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 127
    assert finished.stderr == "/no/such/vllm: No such file or directory\n"
