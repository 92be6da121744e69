"""Reads the gateway's `/status`: the rank table as typed data.

Must never guess: what the gateway does not know is None.
"""

from __future__ import annotations

import os

import aiohttp
import msgspec

ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 << 20


class StatusError(Exception):
    """The gateway's status cannot be read; the message says why."""


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the gateway sees it."""

    rank: str
    group: str
    endpoint: str
    model: str
    state: str
    """`fresh`, `stale`, `unknown` or `down`: how far its report can be trusted."""
    reservations: int
    """Requests on it that the gateway has not seen end."""
    picks: int
    """Requests it was picked for since the gateway started."""
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    """0 to 1."""
    report_age_s: float | None = None
    wave: int | None = None
    unobserved: int = 0
    """Reservations that have no stream any more that would show their end; the rank's reports must."""


class GroupStatus(msgspec.Struct, frozen=True):
    """One group as the gateway sees it."""

    name: str
    engine: str
    healthy: bool


class Status(msgspec.Struct, frozen=True):
    """Everything `/status` says."""

    version: str
    ranks: tuple[RankStatus, ...]
    groups: tuple[GroupStatus, ...]


async def read_status(session: aiohttp.ClientSession, admin_url: str) -> bytes:
    """The status as the gateway wrote it, JSON. Raises StatusError."""
    try:
        async with session.get(f"{admin_url}/status") as answer:
            answer.raise_for_status()
            return await answer.content.read(MAX_ANSWER_BYTES)
    except aiohttp.ClientResponseError as error:
        raise StatusError(
            f"{admin_url}/status answers {error.status}: is that the gateway's admin API?"
        ) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StatusError(f"no gateway at {admin_url} ({_reason(error)}); does `wavegate up` run?") from None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientOSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error)


def parse_status(text: bytes) -> Status:
    """The status as data. Raises StatusError."""
    try:
        return msgspec.json.decode(text, type=Status)
    except msgspec.DecodeError as error:
        raise StatusError(f"this is not a gateway's status: {error}") from None


def status_session() -> aiohttp.ClientSession:
    """An HTTP session with bounded waits; close it after use."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S))
