"""Starts what a configuration asks for on this machine, keeps it running, and stops it in order.

Order of start: ranks, gateway, Envoy. Order of stop: no new requests, drain, Envoy, gateway, ranks.
Must never look into requests, and must never leave a process behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager

import yaml

from gateway import envoy_admin
from gateway.config import Config, endpoint
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import EnvoyError, locate
from gateway.plan import plan, reachable
from gateway.ports import port_problems
from gateway.progress import Progress
from gateway.run_folder import RunFolder
from gateway.unit import Unit, UnitFailed

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
"""A unit that has run this long before it fails is restarted with the first backoff again."""


class StartFailed(Exception):
    """The deployment did not start; everything that had been started is stopped. The message says why."""


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


@contextmanager
def _stop_on_signals() -> Iterator[StopRequest]:
    """Turn signals into a StopRequest for as long as the block lasts."""
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop.signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class Supervisor:
    """One deployment, from start to stop."""

    def __init__(self, config: Config, folder: RunFolder, progress: Progress) -> None:
        """Prepare the deployment; nothing is started or written yet. Raises StartFailed without Envoy."""
        self._config = config
        self._folder = folder
        self._progress = progress
        try:
            planned = plan(config, folder, locate(config.envoy.binary))
        except EnvoyError as error:
            raise StartFailed(str(error)) from None
        self._units = [Unit(unit_plan, folder) for unit_plan in planned.units]
        self._is_serving = False

    async def start(self) -> None:
        """Check the ports, write the configurations, start all units in order. Raises StartFailed."""
        if problems := port_problems(self._config.listeners()):
            raise StartFailed("\n".join(problems))
        data = self._config.model_dump(mode="json")
        self._folder.write_config(yaml.safe_dump(data, sort_keys=False))
        self._folder.write_envoy_config(to_yaml(render(self._config)))
        try:
            for unit in self._units:
                await self._start_unit(unit)
        except UnitFailed as error:
            raise StartFailed(str(error)) from None
        self._is_serving = True

    async def _start_unit(self, unit: Unit) -> None:
        count = len(unit.plan.processes)
        with self._progress.step(unit.plan.name) as step:
            await unit.start(lambda ready: step.show(f"{ready} of {count} ready") if count > 1 else None)
            step.done(f"{f'{count} ranks' if count > 1 else 'ready'} on {unit.plan.serves}")

    async def keep_running(self) -> None:
        """Restart whatever fails, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for unit in self._units:
                tasks.create_task(self._keep(unit))

    async def _keep(self, unit: Unit) -> None:
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

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain, then stop all units in reverse order; at once when `hurry` is set."""
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

    async def _drain(self) -> None:
        settings = self._config.envoy
        admin_url = f"http://{endpoint(reachable(settings.admin_host), settings.admin_port)}"
        timeout_s = self._config.gateway.drain_timeout_s
        with self._progress.step("draining") as step:
            left = await envoy_admin.drain(
                admin_url, timeout_s, lambda active: step.show(f"{active} requests under way")
            )
            step.done(f"{left} requests cut after {timeout_s:g} s" if left else "no request is under way")


async def supervised(
    config: Config, folder: RunFolder, progress: Progress, work: Callable[[], Awaitable[None]]
) -> None:
    """Start a deployment, do `work` while it is kept running, stop it in order, whatever happened.

    The first SIGINT, SIGTERM or SIGHUP cancels `work`; a further one ends all processes at once.

    Raises:
        StartFailed: it did not start; nothing is left running.
    """
    supervisor = Supervisor(config, folder, progress)
    with _stop_on_signals() as stop:
        try:
            await _cancelled_by(stop.requested, supervisor.start())
            if not stop.requested.is_set():
                await _cancelled_by(stop.requested, _while_kept(supervisor, work))
        finally:
            await supervisor.stop(stop.hurry)


async def _while_kept(supervisor: Supervisor, work: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(supervisor.keep_running())
        await work()
        keeping.cancel()


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
