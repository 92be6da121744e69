"""A group under supervision: real processes in the ranks' place, and a stand-in for the gateway they tell."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from ext_proc.vocabulary import Rank
from gateway.config import SupervisionSection
from gateway.gateway_groups import GatewayGroups
from gateway.group_keeper import GroupKeeper
from gateway.plan import GroupPlan, ProcessPlan, UnitPlan
from gateway.progress import Progress
from gateway.run_folder import locked_run_folder
from gateway.supervisor import Supervisor
from gateway.unit import Unit, UnitFailed
from tests.builders_processes import Journal, eventually, process, running, unit

LONG_ENOUGH_S = 4.0
"""For a small process to start, on a busy machine."""
QUICK = {"first_backoff_s": 0.1, "max_failures_in_a_row": 3, "restart_hung_after_s": 5.0}
HUNG = {"verdict": "hung", "rank": "g/0", "for_s": 9.0, "reason": "rank g/0: no step of its engine"}


class StandInGateway:
    """The `/groups` of a gateway: remembers who is taken out, and says what it is told to."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.orders: list[tuple[str, bool, str]] = []
        """Group, whether in rotation, and who says so; repetitions left out."""
        self.trouble: dict[str, dict[str, Any]] = {}
        self.reservations = 0
        self.url = ""

    async def put(self, request: web.Request) -> web.Response:
        """An order about one group."""
        body = await request.json()
        order = (request.match_info["name"], body["in_rotation"], body["by"])
        if order not in self.orders[-1:]:
            self.orders.append(order)
            with self._journal.path.open("a") as file:
                file.write(f"{'in' if order[1] else 'out'} {order[0]} 0\n")
        return web.json_response({})

    async def get(self, _request: web.Request) -> web.Response:
        """What is wrong."""
        return web.json_response(
            [
                {
                    "name": name,
                    "in_rotation": True,
                    "reservations": self.reservations,
                    "trouble": self.trouble.get(name),
                }
                for name in ("g", "h")
            ]
        )


class Scene:
    """A supervisor's surroundings."""

    def __init__(self, folder: Path, gateway: StandInGateway, journal: Journal) -> None:
        self.gateway = gateway
        self.journal = journal
        self.settings = SupervisionSection.model_validate(QUICK)
        self._folder = folder
        self._output = io.StringIO()

    @property
    def told(self) -> str:
        """All lines for people."""
        return self._output.getvalue()

    async def told_of(self, text: str, times: int = 1) -> None:
        """Wait until people have been told."""
        await eventually(lambda: self.told.count(text) >= times)

    def events(self) -> list[str]:
        """Starts and stops of ranks and orders to the gateway, in order."""
        lines = self.journal.path.read_text().splitlines()
        return [" ".join(line.split()[:2]) for line in lines]

    async def supervise(self, *units: UnitPlan, work: Callable[[], Awaitable[None]]) -> None:
        """Run these units while `work` is done."""

        async def drain() -> None:
            pass

        progress = Progress(Console(file=self._output, width=300))
        gateway = GatewayGroups(self.gateway.url, "supervisor")

        def make(unit: Unit) -> GroupKeeper:
            return GroupKeeper(unit, gateway, progress, self.settings, drain_timeout_s=5.0)

        with locked_run_folder(self._folder / "run") as folder:
            async with gateway.talking():
                await Supervisor(units, folder, progress, drain, make).run(work)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A folder and a gateway."""
    journal = Journal(tmp_path / "journal")
    journal.path.touch()
    gateway = StandInGateway(journal)
    app = web.Application()
    app.add_routes([web.get("/groups", gateway.get), web.put("/groups/{name}/rotation", gateway.put)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield Scene(tmp_path, gateway, journal)
    finally:
        await runner.cleanup()


def group(*processes: ProcessPlan, name: str = "g", other_ranks: int = 0, **fields: Any) -> UnitPlan:
    """A group whose ranks are these processes; `other_ranks` run elsewhere."""
    endpoints = [plan.ready_url.removeprefix("http://").rstrip("/") for plan in processes]
    ranks = tuple(Rank(name, other_ranks + i, address) for i, address in enumerate(endpoints))
    plan = unit(f"group {name}", *processes, **fields)
    return replace(plan, group=GroupPlan(name, "m", ranks))


def vllm(plan: ProcessPlan) -> ProcessPlan:
    """The same process, whose log is taken for that of a vLLM server."""
    return replace(plan, is_vllm=True)


async def kill_whenever_up(scene: Scene, victim: str) -> None:
    """SIGKILL this process of group g each time that the group has started."""
    for times_up in count(1):
        await scene.told_of("group g is up", times_up)
        os.kill(scene.journal.pids(victim)[-1], signal.SIGKILL)


async def nothing() -> None:
    """No work."""


async def forever() -> None:
    """Work that only a failure ends."""
    await asyncio.Event().wait()


async def test_a_group_that_loses_a_rank_leaves_rotation_first_and_comes_back_last(scene: Scene) -> None:
    async def kill_one() -> None:
        (victim,) = scene.journal.pids("b")
        os.kill(victim, signal.SIGKILL)
        await scene.told_of("back in rotation")

    await scene.supervise(group(process("a", scene.journal), process("b", scene.journal)), work=kill_one)
    events = scene.events()
    assert sorted(events[:2]) == ["started a", "started b"]
    assert events[2:4] == ["out g", "stopped a"]
    assert sorted(events[4:6]) == ["started a", "started b"]
    assert events[6] == "in g"
    assert scene.gateway.orders == [("g", False, "supervisor"), ("g", True, "supervisor")]
    assert scene.told.count("b ended with signal SIGKILL") == 1
    assert "! its last words:\n  | b says hello\nrestarting group g in " in scene.told
    assert running(scene.journal.pids()) == []


async def test_a_hang_that_lasts_is_ended_by_a_restart(scene: Scene) -> None:
    async def hang() -> None:
        scene.gateway.trouble["g"] = HUNG
        await scene.told_of("is out of rotation: rank g/0: no step of its engine")
        scene.gateway.trouble.clear()
        await scene.told_of("back in rotation")

    await scene.supervise(group(process("a", scene.journal)), work=hang)
    assert scene.journal.entries("started") == ["a", "a"]


async def test_a_hang_that_may_pass_is_waited_for(scene: Scene) -> None:
    async def hang() -> None:
        scene.gateway.trouble["g"] = {**HUNG, "for_s": 4.9}
        await asyncio.sleep(1.5)

    await scene.supervise(group(process("a", scene.journal)), work=hang)
    assert scene.journal.entries("started") == ["a"]


async def test_a_rank_that_answers_is_not_restarted_because_the_gateway_cannot_see_it(scene: Scene) -> None:
    async def lose_sight() -> None:
        scene.gateway.trouble["g"] = {**HUNG, "verdict": "dead"}
        await asyncio.sleep(1.5)

    await scene.supervise(group(process("a", scene.journal)), work=lose_sight)
    assert scene.journal.entries("started") == ["a"]


async def test_ranks_of_another_machine_that_are_dead_take_those_of_this_one_along(scene: Scene) -> None:
    async def lose_the_other_machine() -> None:
        scene.gateway.trouble["g"] = {**HUNG, "verdict": "dead"}
        await scene.told_of("is out of rotation")
        scene.gateway.trouble.clear()
        await scene.told_of("back in rotation")

    await scene.supervise(group(process("a", scene.journal), other_ranks=1), work=lose_the_other_machine)
    assert scene.journal.entries("started") == ["a", "a"]


async def test_without_a_gateway_a_group_is_restarted_all_the_same(scene: Scene) -> None:
    scene.gateway.url = "http://127.0.0.1:1"

    async def kill() -> None:
        (victim,) = scene.journal.pids("a")
        os.kill(victim, signal.SIGKILL)
        await scene.told_of("is ready (the gateway does not answer)")

    await scene.supervise(group(process("a", scene.journal)), work=kill)
    assert scene.journal.entries("started") == ["a", "a"]


async def test_a_crash_loop_ends_with_the_last_words_of_the_rank_that_failed_first(scene: Scene) -> None:
    crashing = group(process("a", scene.journal), process("b", scene.journal))
    with pytest.raises(UnitFailed) as failure:
        await scene.supervise(crashing, work=lambda: kill_whenever_up(scene, "b"))
    message, *words = str(failure.value).splitlines()
    assert message.startswith("group g failed 3 times in a row and is given up; at last: b ended with ")
    assert words == ["  | b says hello"]
    waits = [line.rpartition(" in ")[2] for line in scene.told.splitlines() if line.startswith("restarting")]
    assert waits == ["0.1 s", "0.2 s"]
    assert scene.gateway.orders[-1] == ("g", False, "supervisor")
    assert running(scene.journal.pids()) == []


async def test_while_another_group_serves_one_that_is_given_up_stays_out(scene: Scene) -> None:
    async def fail_for_good() -> None:
        killing = asyncio.create_task(kill_whenever_up(scene, "a"))
        await scene.told_of("group g failed 3 times in a row and is given up")
        killing.cancel()
        await asyncio.sleep(0.5)

    good = group(process("b", scene.journal), name="h")
    await scene.supervise(group(process("a", scene.journal)), good, work=fail_for_good)
    assert scene.journal.entries("stopped") == ["b"]
    assert scene.gateway.orders[-1] == ("g", False, "supervisor")


async def test_a_rank_that_cannot_answer_a_first_request_has_not_started(scene: Scene) -> None:
    with pytest.raises(
        UnitFailed, match="rank g/0 was ready, but a request was answered 500: a is still running"
    ):
        await scene.supervise(group(process("a", scene.journal, cold=1)), work=nothing)
    assert running(scene.journal.pids()) == []


async def test_groups_start_beside_each_other(scene: Scene) -> None:
    slow = group(process("a", scene.journal, unready=1), name="g", ready_timeout_s=LONG_ENOUGH_S)
    with pytest.raises(UnitFailed, match="no answer from"):
        await scene.supervise(slow, group(process("b", scene.journal), name="h"), work=nothing)
    assert sorted(scene.journal.entries("started")) == ["a", "b"]
    assert running(scene.journal.pids()) == []


async def test_a_rank_that_somebody_else_stops_may_finish_its_requests(scene: Scene) -> None:
    stopping = "[shutdown]_API_server:_shutdown_triggered"
    scene.gateway.reservations = 1

    async def watch() -> None:
        await scene.told_of("is out of rotation: a shuts down, and nobody here has asked it to")
        await asyncio.sleep(0.5)
        assert scene.journal.entries("stopped") == []
        scene.gateway.reservations = 0
        await eventually(lambda: scene.journal.entries("stopped") == ["a"])

    await scene.supervise(group(vllm(process("a", scene.journal, says=stopping))), work=watch)


async def test_people_are_told_the_phases_of_a_group_that_loads(scene: Scene) -> None:
    loading = vllm(process("a", scene.journal, says="Starting_to_load_model_m", unready=1))
    with pytest.raises(UnitFailed):
        await scene.supervise(group(loading, ready_timeout_s=LONG_ENOUGH_S), work=nothing)
    assert "group g: 1 loading weights" in scene.told


async def test_a_rank_that_is_stuck_in_a_phase_is_named(scene: Scene) -> None:
    scene.settings = SupervisionSection.model_validate({**QUICK, "silent_after_s": 0.5})
    loading = vllm(process("a", scene.journal, says="Starting_to_load_model_m", unready=1))
    with pytest.raises(UnitFailed):
        await scene.supervise(group(loading, ready_timeout_s=LONG_ENOUGH_S), work=nothing)
    (line,) = [line for line in scene.told.splitlines() if "seems stuck: loading" in line]
    assert line.startswith("! rank a seems stuck: loading weights for ")
    assert "nothing in its log for " in line
