"""Envoy in one of the modes, the real ext_proc service, and a decider and ranks that do as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import web

from ext_proc.decision import Decision, Placed, Refused
from ext_proc.ledger import Ledger
from ext_proc.protocol import ProtocolSettings
from ext_proc.service import ExtProcServer, ServerSettings
from ext_proc.usage import Usage
from ext_proc.vocabulary import Pick, PickReason, Rank, RequestFacts
from gateway.access_entries import access_entries_handler
from tests.builders import pool
from tests.builders_envoy import RunningEnvoy, envoy_config, running_envoy
from tests.builders_modes import Mode
from tests.builders_parts import StubRank, refusing_endpoint, stub_rank

CHAT = "/v1/chat/completions"
NO_GATEWAY = "127.0.0.1:1"
"""An ext_proc address where nobody listens."""
DEAD = None
"""In place of a rank: an address that refuses connections."""


async def stream_slowly(request: web.Request) -> web.StreamResponse:
    """Ten events in about a second, with a count of tokens in the last."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for index in range(10):
        await response.write(b'data: {"model":"target","n":%d}\n\n' % index)
        await asyncio.sleep(0.1)
    await response.write(b'data: {"usage":{"prompt_tokens":7,"completion_tokens":10}}\n\ndata: [DONE]\n\n')
    return response


class Chooser:
    """A decider that does as told."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ledger: Ledger = pool(ranks)
        self.choice: Sequence[Rank] = ranks
        self.refusal: Refused | None = None
        self.hold_s = 0.0
        self.server: ExtProcServer | None = None
        self.facts: list[RequestFacts] = []
        self.retries: list[str] = []
        """Endpoints that requests were sent to after another rank had refused them."""
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def reservations(self) -> list[int]:
        """Open reservations, by rank."""
        return [account.reservations for account in self.ledger.accounts]

    def decide(self, facts: RequestFacts, now_s: float) -> Decision:
        self.facts.append(facts)
        if self.hold_s:
            held = HeldRequest()
            settling = asyncio.ensure_future(self._settle(held, facts))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
            return held
        return self._settled(facts, now_s)

    def on_retry(self, request_id: str, endpoint: str) -> None:
        self.retries.append(endpoint)
        self.ledger.note_retry(request_id, endpoint, time.monotonic())

    def on_failed_answer(self, endpoint: str, status: int) -> None:
        pass

    def _settled(self, facts: RequestFacts, now_s: float) -> Placed | Refused:
        if self.refusal is not None:
            return self.refusal
        pick = Pick(tuple(self.choice), PickReason.NO_HEALTHY_GROUP)
        return Placed(pick, self.ledger.reserve(pick.first, facts, now_s))

    async def _settle(self, held: HeldRequest, facts: RequestFacts) -> None:
        await asyncio.sleep(self.hold_s)
        if not held.is_withdrawn:
            held.decision = self._settled(facts, time.monotonic())
            assert self.server is not None
            self.server.wake(held)


class HeldRequest:
    """A request that waits."""

    def __init__(self) -> None:
        self.decision: Placed | Refused | None = None
        self.is_withdrawn = False

    def withdraw(self, _now_s: float) -> None:
        self.is_withdrawn = True


class Observed:
    """What the service observed of responses."""

    def __init__(self) -> None:
        self.responses: list[tuple[str, int | None, Usage | None]] = []

    def on_placed(self, placed: Placed, _duration_s: float) -> None:
        pass

    def on_refused(self, refused: Refused) -> None:
        pass

    def on_response(self, rank: Rank, status: int | None, usage: Usage | None) -> None:
        self.responses.append((rank.name, status, usage))


class Setup:
    """Envoy in one mode, ranks that do as told, the real service, and a decider that does as told."""

    def __init__(
        self, envoy: RunningEnvoy, ranks: list[StubRank], chooser: Chooser, observed: Observed
    ) -> None:
        self.envoy = envoy
        self.ranks = ranks
        self.chooser = chooser
        self.observed = observed

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.envoy.url, timeout=30)

    async def post(self, content: Any = b'{"model":"m","messages":[]}', **headers: str) -> httpx2.Response:
        async with self.client() as http:
            return await http.post(CHAT, content=content, headers=headers)

    async def stop_service(self) -> None:
        """Let the ext_proc service die."""
        assert self.chooser.server is not None
        await self.chooser.server.stop()

    async def until_reservations_are(self, expected: list[int], *, within_s: float) -> None:
        """Fail unless the ranks have these reservations in time."""
        async with asyncio.timeout(within_s):
            while self.chooser.reservations != expected:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def mode_at_work(
    folder: Path,
    mode: Mode,
    *answers: Any,
    with_service: bool = True,
    protocol: Mapping[str, Any] | None = None,
    **envoy_section: Any,
) -> AsyncIterator[Setup]:
    """Envoy in this mode, an answer for each rank, or DEAD.

    `with_service=False` leaves the ext_proc service out; `protocol` are fields of `ProtocolSettings`, other
    keywords of the configuration's section `envoy`.
    """
    async with AsyncExitStack() as parts:
        stubs = []
        for answer in answers:
            if answer is DEAD:
                stub = StubRank()
                stub.endpoint = parts.enter_context(refusing_endpoint())
            else:
                stub = await parts.enter_async_context(stub_rank(answer))
            stubs.append(stub)
        ranks = [Rank("g0", index, stub.endpoint) for index, stub in enumerate(stubs)]
        chooser, observed = Chooser(ranks), Observed()
        chooser.server = ExtProcServer(
            chooser, ServerSettings("127.0.0.1:0"), ProtocolSettings(**(protocol or {})), observed
        )
        chooser.server.serve_also(access_entries_handler(chooser))
        target = NO_GATEWAY
        if with_service:
            target = f"127.0.0.1:{await chooser.server.start()}"
            await chooser.server.set_ready(True)
            parts.push_async_callback(chooser.server.stop)
        config = envoy_config(
            [[stub.endpoint for stub in stubs]], target, mode=mode.rendered_as, **envoy_section
        )
        envoy = await parts.enter_async_context(running_envoy(config, folder, mode.change))
        yield Setup(envoy, stubs, chooser, observed)
