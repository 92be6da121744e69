"""Starting, watching and ending child processes, in one place, so that no orphan survives any exit.

Every child dies with its parent, also when the parent is SIGKILLed: Linux sends SIGKILL through
PR_SET_PDEATHSIG, elsewhere a thread polls the parent's id. A child that is not Python is started through
`python -m vllm_ranks.engine.processes <parent pid> -- command…`, which arranges that and then becomes the
command. Must never import another module of the engine.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

_MODULE = "vllm_ranks.engine.processes"
_PR_SET_PDEATHSIG = 1
_PARENT_POLL_S = 0.5
_KILL_WAIT_S = 5.0


class Child:
    """One running child process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self.exited = asyncio.create_task(process.wait(), name=f"wait for {name}")
        """Done when the process has ended; its result is the exit code (negative: signal)."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; `None` while it runs."""
        return self._process.returncode

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Standard output; only of a child started with `capture_stdout`."""
        if self._process.stdout is None:
            raise ValueError(f"{self.name} was started without capture_stdout")
        return self._process.stdout

    def send_signal(self, number: int) -> None:
        """Signal the child unless it has already ended."""
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass  # ended between the check and the signal


async def start(
    name: str, command: Sequence[str], *, pass_fds: Iterable[int] = (), capture_stdout: bool = False
) -> Child:
    """Start any command so that it dies with this process.

    The child gets a session of its own: Ctrl-C in a terminal reaches only the parent, which ends its
    children in order.

    Raises:
        OSError: the interpreter could not be started. A missing command ends the child with code 127.
    """
    wrapper = (sys.executable, "-m", _MODULE, str(os.getpid()), "--", *command)
    return await _spawn(name, wrapper, pass_fds, capture_stdout)


async def start_module(
    name: str,
    module: str,
    config_json: bytes,
    *,
    pass_fds: Iterable[int] = (),
    capture_stdout: bool = False,
) -> Child:
    """Start `python -m module <parent pid> <config>`; the module calls `die_with_parent` first."""
    command = (sys.executable, "-m", module, str(os.getpid()), config_json.decode())
    return await _spawn(name, command, pass_fds, capture_stdout)


async def _spawn(name: str, command: Sequence[str], pass_fds: Iterable[int], capture_stdout: bool) -> Child:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if capture_stdout else None,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
    )
    return Child(name, process)


async def first_exit(children: Iterable[Child]) -> Child:
    """Wait until one of the children has ended, and return it."""
    by_task = {child.exited: child for child in children}
    done, _ = await asyncio.wait(by_task, return_when=asyncio.FIRST_COMPLETED)
    return by_task[next(iter(done))]


async def end(children: Iterable[Child], timeout_s: float) -> None:
    """SIGTERM all, give them `timeout_s` together, then SIGKILL what is left and reap it."""
    running = [child for child in children if child.returncode is None]
    if not running:
        return
    for child in running:
        child.send_signal(signal.SIGTERM)
    waits = [child.exited for child in running]
    if timeout_s > 0:
        await asyncio.wait(waits, timeout=timeout_s)
    for child in running:
        child.send_signal(signal.SIGKILL)
    # SIGKILL cannot be refused; the bound is for a process stuck in the kernel.
    await asyncio.wait(waits, timeout=_KILL_WAIT_S)


def describe_exit(returncode: int | None) -> str:
    """`exit code 3` or `signal SIGKILL`, for log lines and errors."""
    if returncode is not None and returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"


def die_with_parent(parent_pid: int) -> None:
    """Arrange that this process is killed when `parent_pid` ends; exit at once if it already has.

    To be called before anything else in a child's main function, from its main thread.
    """
    if not _set_parent_death_signal(signal.SIGKILL):
        threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    # The parent may have ended before the line above took effect.
    if os.getppid() != parent_pid:
        os._exit(1)


def _set_parent_death_signal(number: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    result: int = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return result == 0


def _exit_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def main(arguments: Sequence[str]) -> NoReturn:
    """`<parent pid> -- command…`: tie this process to its parent, then become the command."""
    parent_pid, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: python -m vllm_ranks.engine.processes <parent pid> -- command…")
    die_with_parent(int(parent_pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
