"""Stays with one vLLM server as its parent, so that nothing the server has started can outlive it. Linux.

    python -m vllm_ranks.launcher.guard -- vllm serve …

vLLM's engine and worker processes do not notice when their server is killed: they go on, hold their devices,
and keep the group's lock step running without it. So the guard adopts whatever loses its parent (it is
their "subreaper"), passes signals on to the server, and kills what is left when the server or the guard's own
parent has ended. If the guard itself is killed, the server dies with it. Ends as the server ended.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

PARENT_DIED = signal.SIGUSR1
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TIDY_UP_S = 2.0
"""How long Python's resource tracker gets to remove shared memory that killed processes have left."""
GIVE_UP_S = 10.0
"""After this, what still runs is stuck in the kernel."""

_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> NoReturn:
    """`-- command…`: run the command until it, or whoever started this, has ended."""
    if len(arguments) < 2 or arguments[0] != "--":
        raise SystemExit("usage: python -m vllm_ranks.launcher.guard -- command…")
    parent = os.getppid()
    waited_for = {signal.SIGCHLD, PARENT_DIED, *PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    _prctl(_PR_SET_PDEATHSIG, PARENT_DIED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before its death could be told
        os._exit(1)
    server = _start(list(arguments[1:]), waited_for)
    status = None
    while status is None:
        received = signal.sigwaitinfo(waited_for).si_signo
        if received == signal.SIGCHLD:
            status = _reap().get(server)
        elif received == PARENT_DIED:
            break
        else:
            os.kill(server, received)
    _kill_all_below()
    _end_as(status)


def _start(command: list[str], blocked: set[signal.Signals]) -> int:
    guard = os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    os._exit(127)


def _reap() -> dict[int, int]:
    """Collect children that have ended, and adopted ones: their wait statuses by process id."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _kill_all_below() -> None:
    """Kill all descendants: the children of each killed one become ours, and it is their turn next."""
    started_s = time.monotonic()
    while children := list(_children()):
        elapsed_s = time.monotonic() - started_s
        if elapsed_s > GIVE_UP_S:
            return
        for pid in children:
            if elapsed_s > TIDY_UP_S or not _is_resource_tracker(pid):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)


def _children() -> Iterator[int]:
    own = os.getpid()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[1]) == own:
            yield int(stat.parent.name)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return _RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _end_as(status: int | None) -> NoReturn:
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    sys.exit(1 if status is None else os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
