"""Envoy's admin interface, as far as stopping in order needs it.

Must never be used by what carries requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

ANSWER_TIMEOUT_S = 2.0
POLL_S = 0.1
ACTIVE_REQUESTS = "http.openai.downstream_rq_active"


async def drain(admin_url: str, timeout_s: float, on_active: Callable[[int], None]) -> int | None:
    """Let Envoy take no new requests and wait until those under way have ended.

    `on_active` is told their number again and again. Returns how many were left at the timeout; None
    when Envoy does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(admin_url, timeout=timeout) as session:
        try:
            # /ready answers 503 from now on, and kept connections are closed with their next answer …
            await _post(session, "/healthcheck/fail")
            # … and new ones are refused.
            await _post(session, "/drain_listeners")
            return await _wait_until_idle(session, timeout_s, on_active)
        except (aiohttp.ClientError, TimeoutError):
            return None


async def _post(session: aiohttp.ClientSession, path: str) -> None:
    async with session.post(path) as answer:
        answer.raise_for_status()


async def _wait_until_idle(
    session: aiohttp.ClientSession, timeout_s: float, on_active: Callable[[int], None]
) -> int:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        async with session.get("/stats", params={"filter": f"^{ACTIVE_REQUESTS}$"}) as answer:
            active = int((await answer.text()).rpartition(":")[2])
        if active == 0 or loop.time() >= deadline_s:
            return active
        on_active(active)
        await asyncio.sleep(POLL_S)
