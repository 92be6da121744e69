"""What supervisors tell the gateway about their groups, and what it tells them: a client of its `/groups`.

Says again and again what it wants, so that a gateway that was restarted knows it too. Must never wait long: a
gateway that does not answer must not keep a group from being restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from gateway.admin_token import headers_with
from vllm_ranks.reports.asking import TooLong, read_at_most

log = logging.getLogger(__name__)

POLL_S = 0.5
ANSWER_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 16 << 20


class TroubleState(msgspec.Struct, frozen=True):
    """What is wrong with a group."""

    verdict: str
    """`dead` or `hung`."""
    rank: str
    for_s: float
    reason: str


class GroupState(msgspec.Struct, frozen=True):
    """One group as the gateway sees it."""

    name: str
    in_rotation: bool
    reservations: int
    trouble: TroubleState | None = None


class GatewayGroups:
    """The groups of one gateway, as one holder of them sees and keeps them."""

    def __init__(self, admin_url: str, holder: str, token: str | None = None) -> None:
        """`holder` names this supervisor among others that keep groups out of rotation.

        `token`: the secret that the gateway asks for, if it does.
        """
        self._admin_url = admin_url
        self._holder = holder
        self._headers = headers_with(token)
        self._refusal: int | None = None
        self._kept_out: dict[str, str] = {}
        self._states: Mapping[str, GroupState] = {}
        self._asked_at_s = float("-inf")
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def talking(self) -> AsyncIterator[None]:
        """Keep in touch with the gateway as long as the block lasts."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            self._session = session
            talking = asyncio.create_task(self._keep_talking())
            try:
                yield
            finally:
                talking.cancel()
                self._session = None

    def state(self, group: str) -> GroupState | None:
        """What the gateway said last; `None` if it has not said anything for a while."""
        if time.monotonic() - self._asked_at_s > 2 * (POLL_S + ANSWER_TIMEOUT_S):
            return None
        return self._states.get(group)

    async def take_out(self, group: str, reason: str) -> bool:
        """Let no new requests come to the group, from now on; whether the gateway has heard it."""
        self._kept_out[group] = reason[:500]
        return await self._put(group)

    async def bring_back(self, group: str) -> bool:
        """As far as this supervisor is concerned, requests may come; whether the gateway has heard it."""
        self._kept_out.pop(group, None)
        return await self._put(group)

    async def wait_until_in(self, group: str, timeout_s: float) -> bool:
        """Wait until the group gets requests: the gateway looks at it itself, and others may hold it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            await self._ask()
            state = self.state(group)
            if state is None or state.in_rotation or time.monotonic() >= deadline_s:
                return state is not None and state.in_rotation
            await asyncio.sleep(POLL_S / 5)

    async def wait_until_idle(self, group: str, timeout_s: float) -> int | None:
        """Wait until no request is under way on the group; how many are left, `None` if nobody can tell."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            await self._ask()
            state = self.state(group)
            if state is None or state.reservations == 0 or time.monotonic() >= deadline_s:
                return None if state is None else state.reservations
            await asyncio.sleep(POLL_S / 5)

    async def _keep_talking(self) -> None:
        while True:
            for group in list(self._kept_out):
                await self._put(group)
            await self._ask()
            await asyncio.sleep(POLL_S)

    async def _put(self, group: str) -> bool:
        reason = self._kept_out.get(group)
        body = {"in_rotation": reason is None, "reason": reason or "", "by": self._holder}
        if self._session is None:
            return False
        url = f"{self._admin_url}/groups/{group}/rotation"
        try:
            async with self._session.put(
                url, json=body, headers=self._headers, allow_redirects=False
            ) as answer:
                self._note_refusal(None if answer.status == 200 else answer.status)
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _note_refusal(self, status: int | None) -> None:
        if status is not None and status != self._refusal:
            log.warning(
                "the gateway at %s answers %d to what it is told about groups%s",
                self._admin_url,
                status,
                ": gateway.admin_token_file must be the same here and there" if status == 401 else "",
            )
        self._refusal = status

    async def _ask(self) -> None:
        if self._session is None:
            return
        try:
            async with self._session.get(f"{self._admin_url}/groups") as answer:
                text = await read_at_most(answer.content, MAX_ANSWER_BYTES)
            states = msgspec.json.decode(text, type=list[GroupState])
        except (aiohttp.ClientError, TimeoutError, TooLong, msgspec.DecodeError):
            return
        self._states = {state.name: state for state in states}
        self._asked_at_s = time.monotonic()
