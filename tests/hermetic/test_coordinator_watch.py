"""The end of a coordinator is seen, even while its parent has not noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from tests.builders_group import eventually
from vllm_ranks.launcher.coordinator_watch import CoordinatorWatch

RANK = textwrap.dedent(
    """
    import os, sys, time
    for title in sys.argv[1:]:
        if os.fork() == 0:
            with open("/proc/self/comm", "w") as file:
                file.write(title)
            os.write(1, f"{os.getpid()}{os.linesep}".encode())
            time.sleep(300)
    time.sleep(300)
    """
)
"""A process that never waits for its children, which call themselves by these titles."""


@pytest.fixture
def rank() -> Iterator[Callable[..., tuple[int, list[int]]]]:
    """Starts a process in a session of its own; returns its id and its children's."""
    started: list[subprocess.Popen[str]] = []

    def start(*titles: str) -> tuple[int, list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, *titles], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        return process.pid, [int(process.stdout.readline()) for _ in titles]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_running_coordinator_has_not_ended(rank: Callable[..., tuple[int, list[int]]]) -> None:
    session, _ = rank("VLLM::EngineCore", "VLLM::DPCoordinator")
    watch = CoordinatorWatch(session)
    assert [watch.has_ended() for _ in range(3)] == [False] * 3


def test_a_killed_coordinator_has(rank: Callable[..., tuple[int, list[int]]]) -> None:
    session, (coordinator,) = rank("VLLM::DPCoordinator")
    watch = CoordinatorWatch(session)
    assert not watch.has_ended()
    os.kill(coordinator, signal.SIGKILL)
    assert eventually(watch.has_ended)


def test_one_that_has_not_come_yet_has_not_ended(rank: Callable[..., tuple[int, list[int]]]) -> None:
    session, _ = rank("VLLM::EngineCore")
    watch = CoordinatorWatch(session)
    assert not watch.has_ended()
    assert not watch.has_ended()


def test_the_coordinator_of_another_group_is_not_taken_for_it(
    rank: Callable[..., tuple[int, list[int]]],
) -> None:
    session, _ = rank("VLLM::EngineCore")
    _, (other,) = rank("VLLM::DPCoordinator")
    watch = CoordinatorWatch(session)
    assert not watch.has_ended()
    os.kill(other, signal.SIGKILL)
    assert not watch.has_ended()
