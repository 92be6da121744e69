"""Keeps the units of a deployment running on this machine, and stops them in order.

They start in the order given and stop in the reverse one, after a drain. Must never look into requests, know
what a unit does, or leave a process behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gateway.group_keeper import GroupGivenUp, GroupKeeper
from gateway.plan import UnitPlan
from gateway.progress import Progress
from gateway.restarts import RestartLimits, Restarts
from gateway.run_folder import RunFolder
from gateway.unit import Unit, UnitFailed

RESTART_LIMITS = RestartLimits(first_backoff_s=0.5, max_backoff_s=30.0, stable_after_s=60.0)

Drain = Callable[[], Awaitable[None]]
"""Stops the flow of new work and waits for the work under way; called while everything still runs."""
Work = Callable[[], Awaitable[None]]


class StopRequest:
    """Whether to stop (first signal), and whether to hurry (any further one)."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurry = asyncio.Event()

    def signal(self) -> None:
        """What SIGINT, SIGTERM and SIGHUP do."""
        if self.requested.is_set():
            self.hurry.set()
        self.requested.set()


class Keeper(Protocol):
    """Starts one unit and keeps it running, after its own manner."""

    @property
    def unit(self) -> Unit:
        """What it keeps."""
        ...

    async def start(self) -> None:
        """Start the unit. Raises UnitFailed."""
        ...

    async def keep(self) -> None:
        """Restart the unit whenever that is needed; until cancelled. Raises GroupGivenUp."""
        ...


class UnitKeeper:
    """Restarts a unit, whole, whenever it loses a process; for ever."""

    def __init__(self, unit: Unit, progress: Progress) -> None:
        self.unit = unit
        self._progress = progress

    async def start(self) -> None:
        """Start the unit. Raises UnitFailed."""
        count = len(self.unit.plan.processes)
        with self._progress.step(self.unit.plan.name) as step:
            await self.unit.start(lambda ready: step.show(f"{ready} of {count} ready") if count > 1 else None)
            step.done(self.unit.plan.serves)

    async def keep(self) -> None:
        """Restart the unit whenever it loses a process; until cancelled."""
        loop = asyncio.get_running_loop()
        restarts = Restarts(RESTART_LIMITS)
        while True:
            started_s = loop.time()
            failure: UnitFailed | None = await self.unit.wait_for_loss()
            served_s = loop.time() - started_s
            while failure is not None:
                wait_s = restarts.failed(served_s) or 0.0
                self._progress.problem(f"{failure}\nrestarting {self.unit.plan.name} in {wait_s:g} s")
                await self.unit.stop()
                await asyncio.sleep(wait_s)
                failure, served_s = await self._start_again(), 0.0

    async def _start_again(self) -> UnitFailed | None:
        try:
            await self.start()
        except UnitFailed as error:
            return error
        return None


MakeGroupKeeper = Callable[[Unit], GroupKeeper]


class Supervisor:
    """One deployment, from start to stop."""

    def __init__(
        self,
        units: Sequence[UnitPlan],
        folder: RunFolder,
        progress: Progress,
        drain: Drain,
        make_group_keeper: MakeGroupKeeper | None = None,
        *,
        other_groups: int = 0,
    ) -> None:
        """Supervise `units`; those that are groups are kept by what `make_group_keeper` makes, if given.

        It ends when all groups have been given up, unless there are `other_groups` that somebody else keeps.
        """
        self._keepers: list[Keeper] = [
            make_group_keeper(Unit(plan, folder))
            if plan.group is not None and make_group_keeper is not None
            else UnitKeeper(Unit(plan, folder), progress)
            for plan in units
        ]
        self._units = [keeper.unit for keeper in self._keepers]
        self._progress = progress
        self._drain = drain
        self._other_groups = other_groups
        self._is_serving = False

    async def run(self, work: Work) -> None:
        """Start all units, do `work` while they are kept running, stop them, whatever happened.

        The first SIGINT, SIGTERM or SIGHUP cancels `work`; a further one kills all processes at once.

        Raises:
            UnitFailed: a unit did not start. Nothing is left running.
        """
        with _stop_on_signals() as stop:
            try:
                await _cancelled_by(stop.requested, self._start())
                if not stop.requested.is_set():
                    await _cancelled_by(stop.requested, self._while_kept_running(work))
            finally:
                await self._stop(stop.hurry)

    async def _start(self) -> None:
        """Groups come up beside each other, since real models load for minutes; the rest in order."""
        groups = [keeper for keeper in self._keepers if keeper.unit.plan.group is not None]
        await _all_or_none(keeper.start() for keeper in groups)
        for keeper in self._keepers:
            if keeper.unit.plan.group is None:
                await keeper.start()
        self._is_serving = True

    async def _while_kept_running(self, work: Work) -> None:
        given_up: UnitFailed | None = None
        groups_left = self._other_groups + sum(keeper.unit.plan.group is not None for keeper in self._keepers)

        async def keep(keeper: Keeper) -> None:
            nonlocal groups_left
            try:
                await keeper.keep()
            except GroupGivenUp as error:
                groups_left -= 1
                if groups_left == 0:
                    raise UnitFailed(str(error)) from None
                self._progress.problem(str(error))

        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = [tasks.create_task(keep(keeper)) for keeper in self._keepers]
                await work()
                for task in keeping:
                    task.cancel()
        except* UnitFailed as failures:
            given_up = UnitFailed(str(failures.exceptions[0]))
        if given_up is not None:
            raise given_up

    async def _stop(self, hurry: asyncio.Event) -> None:
        stopping = asyncio.create_task(self._stop_in_order())
        await _first_of(stopping, hurry)
        if not stopping.done():
            self._progress.note("stopping at once")
            for unit in self._units:
                unit.kill()
        await stopping

    async def _stop_in_order(self) -> None:
        if self._is_serving:
            await self._drain()
        started = [unit for unit in reversed(self._units) if unit.is_started]
        if not started:
            return
        with self._progress.step("stopping") as step:
            for unit in started:
                step.show(unit.plan.name)
                await unit.stop()
            step.done("nothing is left running")


@contextmanager
def _stop_on_signals() -> Iterator[StopRequest]:
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it on purpose
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop.signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _cancelled_by(event: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do `work`; when `event` is set first, cancel it."""
    task = asyncio.create_task(work)
    try:
        await _first_of(task, event)
    finally:
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if not event.is_set():
            raise


async def _all_or_none(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Do all at once; when one fails, cancel the others, wait for their end and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_of(task: asyncio.Task[None], event: asyncio.Event) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
