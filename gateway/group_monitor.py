"""Keeps groups that do not serve out of rotation: asks every rank for its health, and judges once per tick.

A group that was out comes back when each of its ranks has answered a request. Restarts nothing: that is the
matter of whoever started the ranks, who can ask here what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import aiohttp

from ext_proc.ledger import Ledger
from ext_proc.vocabulary import Rank, RankReport
from gateway.group_watch import GroupWatch, Trouble
from gateway.rotation import Rotation
from gateway.warm_up import Complaint, complaint
from vllm_ranks.reports.asking import UnexpectedErrors, keep_asking

log = logging.getLogger(__name__)

HOLDER = "gateway"
TICK_S = 0.1
BLIND_AFTER_S = 0.5
"""A tick so late means that this process was kept from running, and so from hearing its ranks."""
PROBE_PAUSE_S = 1.0
SUSPECT_PAUSE_S = 0.2
"""Bounds the requests that doubts about ranks cause."""


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """How closely groups are watched."""

    health_interval_s: float
    health_timeout_s: float
    hang_after_s: float
    warm_up_timeout_s: float


@dataclass(frozen=True, slots=True)
class MonitoredGroup:
    """One group to watch."""

    name: str
    model: str
    ranks: tuple[Rank, ...]


class _Group:
    def __init__(self, group: MonitoredGroup, watch: GroupWatch) -> None:
        self.name = group.name
        self.model = group.model
        self.ranks = group.ranks
        self.watch = watch
        self.trouble: Trouble | None = None
        self.suspected: set[Rank] = set()
        """Ranks whose answers to clients have failed lately, or that have not begun with a request."""
        self.probing: asyncio.Task[None] | None = None


class GroupMonitor:
    """Watches all groups of a gateway."""

    def __init__(
        self,
        groups: Iterable[MonitoredGroup],
        ledger: Ledger,
        rotation: Rotation,
        settings: MonitorSettings,
    ) -> None:
        """Watch `groups`, whose requests `ledger` knows, and keep them out of `rotation` while need be."""
        self._ledger = ledger
        self._rotation = rotation
        self._settings = settings
        self._unexpected = UnexpectedErrors()
        self._groups = {
            group.name: _Group(group, GroupWatch(group.ranks, hang_after_s=settings.hang_after_s))
            for group in groups
        }

    def trouble(self, group: str) -> Trouble | None:
        """What is wrong with a group, as of the last tick."""
        return self._groups[group].trouble

    def on_report(self, rank: Rank, report: RankReport) -> None:
        """A rank has told its counters and gauges."""
        self._groups[rank.group].watch.saw_report(rank, report)

    def on_refusal(self, rank: Rank) -> None:
        """Nobody listens on a rank's port."""
        self._groups[rank.group].watch.saw_refusal(rank, time.monotonic())

    def on_failed_answer(self, endpoint: str, _status: int) -> None:
        """A rank has answered a client's request with an error of its own: see whether it does so to ours."""
        for group in self._groups.values():
            for rank in group.ranks:
                if rank.endpoint == endpoint and group.trouble is None:
                    group.suspected.add(rank)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for group in self._groups.values():
                for rank in group.ranks:
                    tasks.create_task(self._watch_health(session, group.watch, rank))
            ticked_at_s = time.monotonic()
            while True:
                now_s = time.monotonic()
                if now_s - ticked_at_s > BLIND_AFTER_S:
                    for group in self._groups.values():
                        group.watch.was_blind(now_s)
                ticked_at_s = now_s
                for group in self._groups.values():
                    self._judge(group, session, tasks)
                await asyncio.sleep(TICK_S)

    async def _watch_health(self, session: aiohttp.ClientSession, watch: GroupWatch, rank: Rank) -> None:
        await keep_asking(
            rank,
            partial(self._ask_health, session, watch, rank),
            failed=lambda _why: watch.missed_health(rank, time.monotonic()),
            pause_s=lambda: self._settings.health_interval_s,
        )

    async def _ask_health(self, session: aiohttp.ClientSession, watch: GroupWatch, rank: Rank) -> None:
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        url = f"http://{rank.endpoint}/health"
        try:
            async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
                watch.saw_health(rank, answer.status, time.monotonic())
        except TimeoutError:
            watch.missed_health(rank, time.monotonic())
        except (aiohttp.ClientError, OSError):
            watch.saw_refusal(rank, time.monotonic())

    def _judge(self, group: _Group, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        placed = self._ledger.placed_after_s
        trouble = group.watch.trouble(time.monotonic(), placed)
        if trouble is not None:
            if group.trouble is None or group.trouble.verdict is not trouble.verdict:
                log.warning("group %s is out of rotation: %s", group.name, trouble.reason)
            self._rotation.take_out(group.name, HOLDER, trouble.reason)
            group.suspected.clear()
        group.trouble = trouble
        if group.probing is not None and not group.probing.done():
            return
        if trouble is None:
            group.suspected.update(group.watch.doubts(placed))
        is_held = HOLDER in self._rotation.held_out_by(group.name)
        if is_held or group.suspected:
            group.probing = tasks.create_task(self._probe(group, session))

    async def _probe(self, group: _Group, session: aiohttp.ClientSession) -> None:
        """Ask suspects for a sign of life; without any, bring the group back once all answer."""
        if group.suspected and group.trouble is None:
            await self._ask_suspected(group, session)
            return
        asked = group.watch.suspects() or (group.ranks if group.trouble is None else ())
        timeout_s = self._settings.warm_up_timeout_s
        complaints = await asyncio.gather(
            *(self._complaint(session, rank, group.model, timeout_s) for rank in asked)
        )
        for rank, problem in zip(asked, complaints, strict=True):
            if problem is None:
                group.watch.saw_life(rank, time.monotonic())
        if asked == group.ranks and not any(complaints) and group.trouble is None:
            self._rotation.bring_back(group.name, HOLDER)
            log.info("group %s is back: each of its ranks has answered a request", group.name)
        elif any(complaints) or not asked:
            await asyncio.sleep(PROBE_PAUSE_S)

    async def _complaint(
        self, session: aiohttp.ClientSession, rank: Rank, model: str, timeout_s: float
    ) -> Complaint | None:
        try:
            return await complaint(session, rank.endpoint, model, timeout_s)
        except Exception as error:
            return Complaint(self._unexpected.describe(rank, error))

    async def _ask_suspected(self, group: _Group, session: aiohttp.ClientSession) -> None:
        """Whether ranks that seem not to serve clients do not serve us either."""
        asked_at_s, timeout_s = time.monotonic(), self._settings.hang_after_s
        suspected = sorted(group.suspected, key=lambda rank: rank.index)
        group.suspected.clear()
        complaints = await asyncio.gather(
            *(self._complaint(session, rank, group.model, timeout_s) for rank in suspected)
        )
        for rank, problem in zip(suspected, complaints, strict=True):
            if problem is None:
                group.watch.saw_life(rank, time.monotonic())
            elif problem.is_late:
                group.watch.saw_late_request(rank, problem.reason, asked_at_s)
            else:
                group.watch.saw_failed_request(rank, problem.reason, time.monotonic())
        await asyncio.sleep(SUSPECT_PAUSE_S)
