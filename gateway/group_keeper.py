"""Keeps one group of ranks serving: out of rotation first, then stopped, started whole, warmed up, back in.

A group is restarted when it loses a process, when a rank shuts down unasked, or when the gateway says that it
is dead or hangs and that does not pass. After too many failures in a row it is given up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from gateway.config import SupervisionSection
from gateway.gateway_groups import GatewayGroups
from gateway.progress import Progress, Step
from gateway.restarts import RestartLimits, Restarts
from gateway.unit import Unit, UnitFailed
from gateway.warm_up import complaint
from vllm_ranks.launcher.coordinator_watch import CoordinatorWatch
from vllm_ranks.launcher.rank_log import Phase, RankLog, describe_together

CHECK_S = 0.25
SETTLE_S = 1.5
"""After one process was lost: vLLM's servers notice the death of their engine within a second."""
DEAD_CONFIRMED_AFTER_S = 5.0
"""A server whose engine is dead ends by itself within 5 s (vLLM's watchdog); later it never will."""
HEALTH_TIMEOUT_S = 2.0
BACK_TIMEOUT_S = 10.0
"""The gateway has to see the ranks' health and to ask each of them before it sends them anything."""
STUCK_STOP_S = 5.0
"""What hangs does not stop when asked."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a group has to be restarted."""

    reason: str
    process_ended: bool = False
    is_stuck: bool = False
    lets_finish: bool = False
    """Whether requests under way may still be answered."""


class GroupGivenUp(Exception):
    """A group failed too often in a row; the message says how it failed last."""


class GroupKeeper:
    """One group of ranks on this machine."""

    def __init__(
        self,
        unit: Unit,
        gateway: GatewayGroups,
        progress: Progress,
        settings: SupervisionSection,
        drain_timeout_s: float,
    ) -> None:
        """Keep `unit`, which must be planned as a group."""
        if unit.plan.group is None:
            raise ValueError(f"{unit.plan.name} is no group")
        self.unit = unit
        self._group = unit.plan.group
        self._gateway = gateway
        self._progress = progress
        self._settings = settings
        self._drain_timeout_s = drain_timeout_s
        self._restarts = Restarts(
            RestartLimits(
                first_backoff_s=settings.first_backoff_s,
                max_backoff_s=settings.max_backoff_s,
                stable_after_s=settings.stable_after_s,
                max_in_a_row=settings.max_failures_in_a_row,
            )
        )

    async def start(self) -> None:
        """Start all ranks, and return when each has answered a request. Raises UnitFailed."""
        unit = self.unit
        count = len(unit.plan.processes)
        with self._progress.step(unit.plan.name) as step:
            watching = asyncio.create_task(self._watch_loading(step)) if unit.plan.is_vllm else None
            try:
                await unit.start(lambda ready: step.show(f"{ready} of {count} ready") if count > 1 else None)
            finally:
                if watching is not None:
                    watching.cancel()
            step.show("first requests")
            await self._warm_up()
            step.done(unit.plan.serves)

    async def keep(self) -> None:
        """Restart the group whenever that is needed; until cancelled. Raises GroupGivenUp."""
        loop = asyncio.get_running_loop()
        while True:
            serving_since_s = loop.time()
            loss = await self._wait_for_loss()
            lost_at_s = loop.time()
            await self._gateway.take_out(self._group.name, loss.reason)
            self._progress.problem(f"{self.unit.plan.name} is out of rotation: {loss.reason}")
            if loss.lets_finish:
                await self._let_finish()
            await self.unit.settle(SETTLE_S)
            failure = self.unit.account() if loss.process_ended else None
            await self.unit.stop(STUCK_STOP_S if loss.is_stuck or loss.lets_finish else None)
            await self._start_again(failure, lost_at_s - serving_since_s, loss.reason)
            back = await self._bring_back()
            took_s = loop.time() - lost_at_s
            self._progress.note(f"{self.unit.plan.name} is {back} {took_s:.1f} s after it was lost")

    async def _bring_back(self) -> str:
        """Let the group have requests; in words, how far that went."""
        if not await self._gateway.bring_back(self._group.name):
            return "ready (the gateway does not answer)"
        if not await self._gateway.wait_until_in(self._group.name, BACK_TIMEOUT_S):
            return "ready, but others keep it out of rotation,"
        return "back in rotation"

    async def _start_again(self, failure: str | None, served_s: float, told: str) -> None:
        """Start the group; `failure` is how the one before failed, of which people know the line `told`."""
        name = self.unit.plan.name
        while True:
            wait_s = self._restarts.failed(served_s)
            if wait_s is None:
                raise GroupGivenUp(
                    f"{name} failed {self._restarts.failures_in_a_row} times in a row and is given up"
                    + ("" if failure is None else f"; at last: {failure}")
                )
            self._progress.problem(f"{_news(failure, told)}restarting {name} in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            try:
                await self.start()
            except UnitFailed as error:
                failure, served_s = str(error), 0.0
                await self.unit.stop()
            else:
                return

    async def _warm_up(self) -> None:
        timeout_s = self._settings.warm_up_timeout_s
        ranks = self._group.ranks
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            complaints = await asyncio.gather(
                *(complaint(session, rank.endpoint, self._group.model, timeout_s) for rank in ranks)
            )
        for rank, problem in zip(ranks, complaints, strict=True):
            if problem is not None:
                await self.unit.settle(SETTLE_S)
                raise UnitFailed(f"rank {rank.name} was ready, but {problem.reason}: {self.unit.account()}")

    # --- Loading -------------------------------------------------------------------------------------

    async def _watch_loading(self, step: Step) -> None:
        """Show the phases, and name a rank that is stuck in one."""
        shown = ""
        named: set[tuple[str, Phase]] = set()
        while True:
            logs = {name.removeprefix("rank "): log for name, log in self.unit.rank_logs.items()}
            step.show(describe_together(logs))
            phases = describe_together(logs, with_percent=False)
            if phases != shown and not self._progress.is_live:
                self._progress.note(f"{self.unit.plan.name}: {phases}")
                shown = phases
            for name, log in logs.items():
                if (name, log.phase) not in named and (words := self._stuck(log)):
                    named.add((name, log.phase))
                    self._progress.problem(f"rank {name} {words}")
            await asyncio.sleep(CHECK_S)

    def _stuck(self, log: RankLog) -> str | None:
        now_s = asyncio.get_running_loop().time()
        silent_s = now_s - log.heard_at_s
        # One that waits for its group is not to blame: another one is loading.
        if silent_s < self._settings.silent_after_s or log.phase in (Phase.JOINING, Phase.READY):
            return None
        return (
            f"seems stuck: {log.describe()} for {now_s - log.phase_since_s:.0f} s, "
            f"and nothing in its log for {silent_s:.0f} s"
        )

    # --- Serving -------------------------------------------------------------------------------------

    async def _wait_for_loss(self) -> Loss:
        ended = asyncio.create_task(self.unit.wait_for_loss())
        seen = asyncio.create_task(self._watch_serving())
        try:
            await asyncio.wait({ended, seen}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return Loss(str(ended.result()).partition("\n")[0], process_ended=True)
            return seen.result()
        finally:
            ended.cancel()
            seen.cancel()

    async def _watch_serving(self) -> Loss:
        above = self._group.coordinator_below
        coordinator = CoordinatorWatch(self.unit.sessions[above]) if above is not None else None
        while True:
            if coordinator is not None and coordinator.has_ended():
                return Loss(f"{above}: the coordinator of its group has ended", lets_finish=True)
            for name, log in self.unit.rank_logs.items():
                if log.phase is Phase.STOPPING:
                    return Loss(f"{name} shuts down, and nobody here has asked it to", lets_finish=True)
            if (loss := await self._gateways_word()) is not None:
                return loss
            await asyncio.sleep(CHECK_S)

    async def _gateways_word(self) -> Loss | None:
        """Whether the gateway says that the group is lost, and it is."""
        state = self._gateway.state(self._group.name)
        trouble = state.trouble if state is not None else None
        if trouble is None:
            return None
        if trouble.verdict == "hung" and trouble.for_s >= self._settings.restart_hung_after_s:
            return Loss(trouble.reason, is_stuck=True)
        if trouble.verdict == "dead" and trouble.for_s >= DEAD_CONFIRMED_AFTER_S:
            # A gateway that is itself cut off must not restart what works.
            own = any(rank.name == trouble.rank for rank in self._group.ranks)
            if not own or not await self._all_healthy():
                return Loss(trouble.reason, is_stuck=True)
        return None

    async def _all_healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                for rank in self._group.ranks:
                    async with session.get(f"http://{rank.endpoint}/health") as answer:
                        if answer.status != 200:
                            return False
            except (aiohttp.ClientError, TimeoutError):
                return False
        return True

    async def _let_finish(self) -> None:
        """Requests under way go on until they end, a rank ends, or the time for a drain is over."""
        idle = asyncio.create_task(self._gateway.wait_until_idle(self._group.name, self._drain_timeout_s))
        ended = asyncio.create_task(self.unit.wait_for_loss())
        await asyncio.wait({idle, ended}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        ended.cancel()


def _news(failure: str | None, told: str) -> str:
    """The lines of a failure, but for a first one that people have been told; each ends with a line end."""
    if failure is None or failure == told:
        return ""
    first, _, words = failure.partition("\n")
    return f"its last words:\n{words}\n" if first == told else f"{failure}\n"
