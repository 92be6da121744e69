"""Keeps the units of a deployment running on this machine, and stops them in order.

They start in the order given and stop in the reverse one, after a drain. Must never look into requests, know
what a unit does, or leave a process behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager

from gateway.plan import UnitPlan
from gateway.progress import Progress
from gateway.run_folder import RunFolder
from gateway.unit import Unit, UnitFailed

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
"""A unit that has run this long before it fails is restarted with the first backoff again."""

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


class Supervisor:
    """One deployment, from start to stop."""

    def __init__(
        self, units: Sequence[UnitPlan], folder: RunFolder, progress: Progress, drain: Drain
    ) -> None:
        self._units = [Unit(plan, folder) for plan in units]
        self._progress = progress
        self._drain = drain
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
        for unit in self._units:
            await self._start_unit(unit)
        self._is_serving = True

    async def _start_unit(self, unit: Unit) -> None:
        count = len(unit.plan.processes)
        with self._progress.step(unit.plan.name) as step:
            await unit.start(lambda ready: step.show(f"{ready} of {count} ready") if count > 1 else None)
            step.done(unit.plan.serves)

    async def _while_kept_running(self, work: Work) -> None:
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(self._keep(unit)) for unit in self._units]
            await work()
            for task in keeping:
                task.cancel()

    async def _keep(self, unit: Unit) -> None:
        """Restart the unit, whole, whenever it loses a process; until cancelled."""
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_s = loop.time()
            failure: UnitFailed | None = await unit.wait_for_loss()
            if loop.time() - started_s >= STABLE_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            while failure is not None:
                self._progress.problem(f"{failure}\nrestarting {unit.plan.name} in {backoff_s:g} s")
                await unit.stop()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                failure = await self._restart(unit)

    async def _restart(self, unit: Unit) -> UnitFailed | None:
        try:
            await self._start_unit(unit)
        except UnitFailed as error:
            return error
        return None

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


async def _first_of(task: asyncio.Task[None], event: asyncio.Event) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
