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

import aiohttp

from ext_proc.ledger import Ledger
from ext_proc.vocabulary import Rank, RankReport
from gateway.group_watch import GroupWatch, Trouble
from gateway.rotation import Rotation
from gateway.warm_up import complaint

log = logging.getLogger(__name__)

HOLDER = "gateway"
TICK_S = 0.1
BLIND_AFTER_S = 0.5
"""A tick so late means that this process was kept from running, and so from hearing its ranks."""
PROBE_PAUSE_S = 1.0
SUSPECT_TIMEOUT_S = 2.0
SUSPECT_PAUSE_S = 0.2
"""Bounds the requests that failed answers of clients cause."""


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
        """Ranks whose answers to clients have failed lately."""
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
                    tasks.create_task(self._ask_health(session, group.watch, rank))
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

    async def _ask_health(self, session: aiohttp.ClientSession, watch: GroupWatch, rank: Rank) -> None:
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        while True:
            try:
                async with session.get(f"http://{rank.endpoint}/health", timeout=timeout) as answer:
                    watch.saw_health(rank, answer.status, time.monotonic())
            except TimeoutError:
                watch.missed_health(rank, time.monotonic())
            except (aiohttp.ClientError, OSError):
                watch.saw_refusal(rank, time.monotonic())
            await asyncio.sleep(self._settings.health_interval_s)

    def _judge(self, group: _Group, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        trouble = group.watch.trouble(time.monotonic(), self._waiting_since(group.name))
        if trouble is not None:
            if group.trouble is None or group.trouble.verdict is not trouble.verdict:
                log.warning("group %s is out of rotation: %s", group.name, trouble.reason)
            self._rotation.take_out(group.name, HOLDER, trouble.reason)
            group.suspected.clear()
        group.trouble = trouble
        is_held = HOLDER in self._rotation.held_out_by(group.name)
        if (is_held or group.suspected) and (group.probing is None or group.probing.done()):
            group.probing = tasks.create_task(self._probe(group, session))

    def _waiting_since(self, name: str) -> dict[Rank, float]:
        accounts = [account for account in self._ledger.accounts if account.rank.group == name]
        since = {account.rank: self._ledger.waiting_since_s(account) for account in accounts}
        return {rank: since_s for rank, since_s in since.items() if since_s is not None}

    async def _probe(self, group: _Group, session: aiohttp.ClientSession) -> None:
        """Ask suspects for a sign of life; without any, bring the group back once all answer."""
        if group.suspected and group.trouble is None:
            await self._ask_suspected(group, session)
            return
        asked = group.watch.suspects() or (group.ranks if group.trouble is None else ())
        timeout_s = self._settings.warm_up_timeout_s
        complaints = await asyncio.gather(
            *(complaint(session, rank.endpoint, group.model, timeout_s) for rank in asked)
        )
        for rank, problem in zip(asked, complaints, strict=True):
            if problem is None:
                group.watch.saw_life(rank, time.monotonic())
        if asked == group.ranks and not any(complaints) and group.trouble is None:
            self._rotation.bring_back(group.name, HOLDER)
            log.info("group %s is back: each of its ranks has answered a request", group.name)
        elif any(complaints) or not asked:
            await asyncio.sleep(PROBE_PAUSE_S)

    async def _ask_suspected(self, group: _Group, session: aiohttp.ClientSession) -> None:
        """Whether the ranks whose answers to clients failed fail to answer us too."""
        suspected = sorted(group.suspected, key=lambda rank: rank.index)
        group.suspected.clear()
        complaints = await asyncio.gather(
            *(complaint(session, rank.endpoint, group.model, SUSPECT_TIMEOUT_S) for rank in suspected)
        )
        for rank, problem in zip(suspected, complaints, strict=True):
            # A busy rank may be late; one that fails does so at once.
            if problem is not None and not problem.is_late:
                group.watch.saw_failed_request(rank, problem.reason, time.monotonic())
        await asyncio.sleep(SUSPECT_PAUSE_S)
