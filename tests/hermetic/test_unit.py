"""A unit of real child processes: ready together, stopped together, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.plan import UnitPlan
from gateway.run_folder import RunFolder, locked_run_folder
from gateway.unit import Unit, UnitFailed
from tests.builders_processes import Journal, eventually, is_running, process, running, running_with, unit

MakeUnit = Callable[[UnitPlan], Unit]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """What the children wrote."""
    return Journal(tmp_path / "journal")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Where their logs go."""
    with locked_run_folder(tmp_path / "run") as folder:
        return folder


@pytest.fixture
async def make(folder: RunFolder) -> AsyncIterator[MakeUnit]:
    """Makes units that are stopped at the end of the test."""
    units: list[Unit] = []

    def make_unit(plan: UnitPlan) -> Unit:
        units.append(Unit(plan, folder))
        return units[-1]

    yield make_unit
    for made in units:
        made.kill()
        await made.stop()


async def test_a_unit_is_started_once_all_its_processes_answer(make: MakeUnit, journal: Journal) -> None:
    ready: list[int] = []
    group = make(unit("group", process("a", journal), process("b", journal), process("c", journal)))
    await group.start(ready.append)
    assert ready == [1, 2, 3]
    assert sorted(journal.entries("started")) == ["a", "b", "c"]


async def test_a_process_that_dies_at_start_is_named_with_its_last_words(
    make: MakeUnit, journal: Journal, folder: RunFolder
) -> None:
    group = make(unit("group", process("a", journal), process("b", journal, dies_at_start=1)))
    with pytest.raises(UnitFailed) as failure:
        await group.start()
    assert str(failure.value).splitlines() == [
        f"b ended with exit code 3; log: {folder.log_path('b')}",
        "  | b says hello",
        "  | b cannot go on",
    ]
    await group.stop()
    assert running(journal.pids()) == []


async def test_a_process_that_is_never_ready_is_named_with_the_address_that_was_asked(
    make: MakeUnit, journal: Journal
) -> None:
    slow = process("slow", journal, unready=1)
    group = make(unit("group", process("a", journal), slow, ready_timeout_s=2.0))
    with pytest.raises(UnitFailed, match="slow is still running") as failure:
        await group.start()
    assert str(failure.value).startswith(f"no answer from {slow.ready_url} within 2 s")


async def test_a_command_that_does_not_exist_is_an_ordinary_failure(make: MakeUnit, journal: Journal) -> None:
    missing = process("x", journal)
    missing = type(missing)("x", ("/no/such/program",), missing.ready_url)
    with pytest.raises(UnitFailed, match=r"exit code 127(?s:.*)/no/such/program: No such file"):
        await make(unit("group", missing)).start()


async def test_stop_asks_with_sigterm_and_waits(make: MakeUnit, journal: Journal) -> None:
    group = make(unit("group", process("a", journal), process("b", journal)))
    await group.start()
    await group.stop()
    assert sorted(journal.entries("stopped")) == ["a", "b"]
    assert running(journal.pids()) == []


async def test_a_process_that_ignores_sigterm_is_killed_in_the_end(make: MakeUnit, journal: Journal) -> None:
    group = make(unit("group", process("a", journal, stubborn=1), stop_timeout_s=0.5))
    await group.start()
    await group.stop()
    assert journal.entries("stopped") == ["a"]
    assert running(journal.pids()) == []


async def test_what_a_process_leaves_behind_is_killed_with_it(make: MakeUnit, journal: Journal) -> None:
    group = make(unit("group", process("a", journal, offspring=1)))
    await group.start()
    assert len(journal.pids()) == 2
    await group.stop()
    await eventually(lambda: running(journal.pids()) == [])


async def test_the_first_process_that_is_lost_is_named(make: MakeUnit, journal: Journal) -> None:
    group = make(unit("group", process("a", journal), process("b", journal)))
    await group.start()
    watching = asyncio.create_task(group.wait_for_loss())
    (victim,) = journal.pids("b")
    os.kill(victim, signal.SIGKILL)
    assert str(await watching).startswith("b ended with signal SIGKILL; log: ")
    (other,) = journal.pids("a")
    assert is_running(other)


async def test_a_unit_can_be_started_again(make: MakeUnit, journal: Journal) -> None:
    group = make(unit("group", process("a", journal)))
    await group.start()
    await group.stop()
    await group.start()
    assert journal.entries("started") == ["a", "a"]


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
async def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing_once_stopped(
    make: MakeUnit, journal: Journal, delay_s: float
) -> None:
    group = make(unit("group", process("a", journal), process("b", journal, offspring=1)))
    starting = asyncio.create_task(group.start())
    await asyncio.sleep(delay_s)
    starting.cancel()
    await asyncio.wait([starting])
    await group.stop()
    await eventually(lambda: running_with(str(journal.path)) == [])
    await eventually(lambda: running(journal.pids()) == [])
