"""The supervisor over real child processes: order, restarts, signals, and no orphans on any exit path."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import textwrap
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from gateway.plan import UnitPlan
from gateway.progress import Progress
from gateway.run_folder import RunFolderError, locked_run_folder
from gateway.supervisor import Supervisor
from gateway.unit import UnitFailed
from tests.builders_processes import Journal, eventually, process, running, unit


class Scene:
    """A supervisor's surroundings: what the children wrote, what people were told."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal")
        self._folder = folder
        self._output = io.StringIO()
        self.drained_with: list[int] | None = None

    @property
    def told(self) -> str:
        """All lines for people."""
        return self._output.getvalue()

    async def supervise(self, *units: UnitPlan, work: Callable[[], Awaitable[None]]) -> None:
        """Run these units while `work` is done."""

        async def drain() -> None:
            self.drained_with = running(self.journal.pids())

        progress = Progress(Console(file=self._output, width=200))
        with locked_run_folder(self._folder / "run") as folder:
            await Supervisor(units, folder, progress, drain).run(work)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A folder for one test."""
    return Scene(tmp_path)


async def nothing() -> None:
    """No work."""


async def forever() -> None:
    """Work that only a signal ends."""
    await asyncio.Event().wait()


async def test_units_start_in_order_and_stop_in_the_reverse_one(scene: Scene) -> None:
    names = ("ranks", "gateway", "envoy")
    await scene.supervise(*(unit(name, process(name, scene.journal)) for name in names), work=nothing)
    assert scene.journal.entries("started") == ["ranks", "gateway", "envoy"]
    assert scene.journal.entries("stopped") == ["envoy", "gateway", "ranks"]
    assert running(scene.journal.pids()) == []


async def test_the_drain_comes_first_while_everything_still_runs(scene: Scene) -> None:
    await scene.supervise(unit("a", process("a", scene.journal)), work=nothing)
    assert scene.drained_with == scene.journal.pids()


async def test_when_a_unit_does_not_start_the_earlier_ones_are_stopped(scene: Scene) -> None:
    good, bad = (process("good", scene.journal), process("bad", scene.journal, dies_at_start=1))
    never = process("never", scene.journal)
    with pytest.raises(UnitFailed, match="bad ended with exit code 3"):
        await scene.supervise(unit("1", good), unit("2", bad), unit("3", never), work=nothing)
    assert scene.journal.entries("started") == ["good", "bad"]
    assert running(scene.journal.pids()) == []
    assert scene.drained_with is None


async def test_a_unit_that_loses_a_process_is_restarted_whole(scene: Scene) -> None:
    async def kill_one() -> None:
        (victim,) = scene.journal.pids("b")
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: scene.told.count("pair is up") == 2)

    pair = unit("pair", process("a", scene.journal), process("b", scene.journal))
    await scene.supervise(unit("other", process("c", scene.journal)), pair, work=kill_one)
    assert sorted(scene.journal.entries("started")) == ["a", "a", "b", "b", "c"]
    assert "b ended with signal SIGKILL" in scene.told
    assert running(scene.journal.pids()) == []


async def test_a_unit_that_keeps_failing_is_restarted_ever_more_slowly(scene: Scene) -> None:
    async def kill_it_again_and_again() -> None:
        for times_up in (1, 2, 3):
            await eventually(lambda times_up=times_up: scene.told.count("a is up") == times_up)
            os.kill(scene.journal.pids("a")[-1], signal.SIGKILL)
        await eventually(lambda: "restarting a in 2 s" in scene.told)

    await scene.supervise(unit("a", process("a", scene.journal)), work=kill_it_again_and_again)
    waits = [line.rpartition(" in ")[2] for line in scene.told.splitlines() if line.startswith("restarting")]
    assert waits[:3] == ["0.5 s", "1 s", "2 s"]
    assert running(scene.journal.pids()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_the_work_and_stops_in_order(scene: Scene, number: signal.Signals) -> None:
    async def signal_itself() -> None:
        os.kill(os.getpid(), number)
        await forever()

    await scene.supervise(unit("a", process("a", scene.journal)), work=signal_itself)
    assert scene.journal.entries("stopped") == ["a"]
    assert scene.drained_with == scene.journal.pids()


async def test_a_second_signal_stops_at_once(scene: Scene) -> None:
    async def signal_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGTERM)
        await forever()

    stubborn = unit("a", process("a", scene.journal, stubborn=1), stop_timeout_s=100)
    async with asyncio.timeout(30):
        await scene.supervise(stubborn, work=signal_twice)
    assert "stopping at once" in scene.told
    assert running(scene.journal.pids()) == []


async def test_a_signal_during_the_start_stops_what_has_been_started(scene: Scene) -> None:
    asyncio.get_running_loop().call_later(1.0, os.kill, os.getpid(), signal.SIGINT)
    waiting = unit("slow", process("slow", scene.journal, unready=1), ready_timeout_s=100)
    await scene.supervise(unit("a", process("a", scene.journal)), waiting, work=forever)
    assert running(scene.journal.pids()) == []


async def test_failing_work_stops_everything_too(scene: Scene) -> None:
    async def fail() -> None:
        raise OSError("no")

    with pytest.raises(ExceptionGroup):
        await scene.supervise(unit("a", process("a", scene.journal)), work=fail)
    assert scene.journal.entries("stopped") == ["a"]


async def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from rich.console import Console
        from gateway.progress import Progress
        from gateway.run_folder import RunFolder
        from gateway.supervisor import Supervisor
        from tests.builders_processes import Journal, process, unit

        async def main():
            folder = RunFolder(Path({str(tmp_path)!r}))
            (folder.path / "logs").mkdir()
            journal = Journal(folder.path / "journal")
            units = [unit("g", process("a", journal, stubborn=1), process("b", journal)),
                     unit("h", process("c", journal))]
            async def work():
                print("working", flush=True)
                await asyncio.Event().wait()
            async def drain(): pass
            await Supervisor(units, folder, Progress(Console(quiet=True)), drain).run(work)

        asyncio.run(main())
        """
    )
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE)
    try:
        assert supervisor.stdout is not None
        assert await supervisor.stdout.readline() == b"working\n"
        pids = Journal(tmp_path / "journal").pids()
        assert running(pids) == pids != []
    finally:
        supervisor.kill()
        await supervisor.wait()
    await eventually(lambda: running(pids) == [])


def test_two_deployments_cannot_share_a_folder(tmp_path: Path) -> None:
    refusal = rf"another wavegate \(process {os.getpid()}\) uses"
    with (
        locked_run_folder(tmp_path),
        pytest.raises(RunFolderError, match=refusal),
        locked_run_folder(tmp_path),
    ):
        pass
    with locked_run_folder(tmp_path):
        pass
