"""Two gateways of one pool as processes of their own, and a real Envoy that knows the second as a standby."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx2

from gateway.config import Config
from tests.builders_envoy import RunningEnvoy, running_envoy
from tests.builders_parts import Answer, StubRank, stub_rank
from tests.builders_wavegate import WavegateProcess, adopted_group, running_wavegate, write_config

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"Hello"}]}'
CLIENTS = 6
PAUSE_S = 0.05
NO_TROUBLE = "none"
BROKEN = 0
"""In place of a status: the answer never came, or broke off."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and what became of it; times in seconds since the traffic began."""

    started_s: float
    took_s: float
    status: int
    """Of HTTP, or BROKEN."""


class GatewayInTests:
    """One gateway, which can be killed and started again."""

    def __init__(self, folder: Path, data: Any, parts: AsyncExitStack) -> None:
        self._folder = folder
        self._data = data
        self._parts = parts
        self.command: WavegateProcess | None = None
        self.target: str = data["gateway"]["ext_proc_listen"]

    async def start(self) -> None:
        """Start it, and wait until it would take requests."""
        self.command = await self._parts.enter_async_context(running_wavegate(self._folder, "gateway"))
        await self.command.says("ready")

    async def picks(self) -> int:
        """How many requests it has placed since its start."""
        async with httpx2.AsyncClient() as http:
            url = f"http://127.0.0.1:{self._data['gateway']['admin_port']}/status"
            ranks = (await http.get(url)).json()["ranks"]
        return sum(rank["picks"] for rank in ranks)

    async def trouble(self) -> str:
        """What it thinks is wrong with the group of ranks."""
        async with httpx2.AsyncClient() as http:
            url = f"http://127.0.0.1:{self._data['gateway']['admin_port']}/groups"
            (group,) = (await http.get(url)).json()
        return group["trouble"]["reason"] if group["trouble"] else NO_TROUBLE

    async def gets_requests(self, *, within_s: float) -> None:
        """Return once it places requests; fail if that takes too long."""
        before = await self.picks()
        async with asyncio.timeout(within_s):
            while await self.picks() == before:
                await asyncio.sleep(0.05)


class Pair:
    """The gateways, the Envoy before them, and what clients saw of it."""

    def __init__(
        self, envoy: RunningEnvoy, first: GatewayInTests, standby: GatewayInTests, ranks: list[StubRank]
    ) -> None:
        self.envoy = envoy
        self.first = first
        self.standby = standby
        self.ranks = ranks
        self.sent: list[Sent] = []
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the traffic began."""
        return time.monotonic() - self._began_s

    @property
    def longest_s(self) -> float:
        """What the slowest request took."""
        return max(one.took_s for one in self.sent)

    def statuses(self, since_s: float = 0.0) -> Counter[int]:
        """How often each status was seen, of requests sent since then."""
        return Counter(one.status for one in self.sent if one.started_s >= since_s)

    async def balanced_by_envoy(self) -> int:
        """How many requests nobody picked for."""
        return sum(line["picked"] is None for line in await self.envoy.access_log(len(self.sent)))

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Several clients that send one request after the other, for as long as the block lasts."""
        stop = asyncio.Event()
        self._began_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.envoy.url, connector=connector) as http:

            async def client() -> None:
                while not stop.is_set():
                    started_s = self.now_s
                    try:
                        async with http.post(CHAT, data=BODY) as answer:
                            await answer.read()
                        status = answer.status
                    except aiohttp.ClientError:
                        status = BROKEN
                    self.sent.append(Sent(started_s, self.now_s - started_s, status))
                    await asyncio.sleep(PAUSE_S)

            clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                stop.set()
                await asyncio.gather(*clients)


@asynccontextmanager
async def gateway_pair(folder: Path, *answers: Answer, **envoy_section: Any) -> AsyncIterator[Pair]:
    """Ranks that answer as told, two gateways that are ready, and Envoy; `envoy_section` as in a file."""
    async with AsyncExitStack() as parts:
        ranks = [await parts.enter_async_context(stub_rank(answer)) for answer in answers]
        group = adopted_group(*(rank.endpoint for rank in ranks))
        gateways = []
        for name in ("first", "standby"):
            (folder / name).mkdir()
            data = write_config(folder / name, [group], drain_timeout_s=5)
            gateways.append(GatewayInTests(folder / name, data, parts))
        first, standby = gateways
        await asyncio.gather(first.start(), standby.start())
        config = Config.model_validate(
            {
                "groups": [group],
                "envoy": {"standby_gateways": [standby.target], **envoy_section},
                "gateway": {"ext_proc_listen": first.target},
            }
        )
        envoy = await parts.enter_async_context(running_envoy(config, folder))
        yield Pair(envoy, first, standby, ranks)
