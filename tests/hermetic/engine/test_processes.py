"""Starting, watching and ending child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.builders_group import eventually, is_running
from vllm_ranks.engine import processes

SLEEP = ("sleep", "60")


async def test_a_child_that_ends_tells_its_exit_code() -> None:
    child = await processes.start("shell", ("sh", "-c", "exit 3"))
    assert await child.exited == 3
    assert processes.describe_exit(child.returncode) == "exit code 3"


async def test_a_child_that_is_killed_tells_the_signal() -> None:
    child = await processes.start("sleeper", SLEEP)
    child.send_signal(signal.SIGKILL)
    assert processes.describe_exit(await child.exited) == "signal SIGKILL"
    child.send_signal(signal.SIGTERM)  # too late, harmless


async def test_a_command_that_does_not_exist_ends_like_in_a_shell() -> None:
    child = await processes.start("nothing", ("no-such-command-here",))
    assert await child.exited == 127


async def test_the_first_exit_is_noticed() -> None:
    sleeper = await processes.start("sleeper", SLEEP)
    short = await processes.start("short", ("true",))
    assert await processes.first_exit([sleeper, short]) is short
    await processes.end([sleeper], 1.0)


async def test_ending_asks_first_and_waits() -> None:
    child = await processes.start(
        "polite",
        ("sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"),
        capture_stdout=True,
    )
    await child.stdout.readline()
    await processes.end([child], 5.0)
    assert child.returncode == 7


async def test_ending_kills_what_does_not_listen() -> None:
    child = await processes.start(
        "deaf", ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"), capture_stdout=True
    )
    await child.stdout.readline()
    await processes.end([child], 0.2)
    assert child.returncode == -signal.SIGKILL


async def test_ending_without_a_timeout_kills_at_once() -> None:
    child = await processes.start("sleeper", SLEEP)
    await asyncio.wait_for(processes.end([child], 0.0), 5)
    assert child.returncode is not None


async def test_inherited_descriptors_reach_the_command() -> None:
    read_end, write_end = os.pipe()
    code = f"import os; os.write({write_end}, b'hello')"
    child = await processes.start("writer", (sys.executable, "-c", code), pass_fds=(write_end,))
    os.close(write_end)
    await child.exited
    with os.fdopen(read_end) as pipe:
        assert pipe.read() == "hello"


PARENT = """
import asyncio, sys
from vllm_ranks.engine import processes

async def main():
    child = await processes.start("sleeper", ("sleep", "60"))
    print(child.pid, flush=True)
    await child.exited

asyncio.run(main())
"""


def test_a_command_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        # The wrapper has become the command.
        assert eventually(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        parent.kill()
    assert eventually(lambda: not is_running(child))


def test_a_command_whose_parent_is_gone_already_never_starts() -> None:
    not_the_parent = "1"
    wrapper = [sys.executable, "-m", "vllm_ranks.engine.processes", not_the_parent, "--", "echo", "started"]
    done = subprocess.run(wrapper, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")


POLLING = """
import os, sys, time
from vllm_ranks.engine import processes

processes._set_parent_death_signal = lambda number: False
processes.die_with_parent(int(sys.argv[1]))
time.sleep(60)
"""


def test_without_death_signals_a_child_watches_its_parent() -> None:
    parent_code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {POLLING!r}, str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
    assert eventually(lambda: not is_running(child))
