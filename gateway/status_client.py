"""Reads the gateway's `/status`: the rank table as typed data.

Must never guess: what the gateway does not know is None.
"""

from __future__ import annotations

import os

import aiohttp
import msgspec

from vllm_ranks.reports.asking import TooLong, read_at_most

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
    queued: int = 0
    """Reservations whose prompts the rank has not begun with, by the model of step times; …"""
    prefilling: int = 0
    """… that have had no first token since; …"""
    decoding: int = 0
    """… and that have."""
    unobserved: int = 0
    """Reservations that have no stream any more that would show their end; the rank's reports must."""


class StepTimeStatus(msgspec.Struct, frozen=True):
    """The model of a group's step times, spelled like the section `step_time` of a configuration."""

    fixed_ms: float
    prefill_us_per_token: float
    decode_us_per_sequence: float
    kv_ns_per_token: float


class GroupStatus(msgspec.Struct, frozen=True):
    """One group as the gateway sees it."""

    name: str
    engine: str
    healthy: bool
    lock_step: bool = False
    is_prefilling: bool = False
    lead_tokens: float = 0.0
    """How far decoding is ahead of the TPOT target."""
    decode_step_ms: float = 0.0
    """Of the present load."""
    prefill_step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    budget_tokens: int | None = None
    """`None`: neither told by the configuration nor learned yet."""
    decoding_sequences: float = 0.0
    """Of the rank that has most."""
    kv_tokens: float = 0.0
    observations: int = 0
    """Steps and prefills that the step times were learned from."""
    step_time: StepTimeStatus | None = None
    index_blocks: int = 0
    """Of the prefix indexes."""
    index_bytes: int = 0
    prompts_found: int = 0
    """Prompts known as tokens that ranks have computed and then said they hold …"""
    prompts_missing: int = 0
    """… and such as they did not."""


class TargetsStatus(msgspec.Struct, frozen=True):
    """What the gateway works towards."""

    ttft_ms: float
    tpot_ms: float


class HeldStatus(msgspec.Struct, frozen=True):
    """Requests that wait in the gateway."""

    requests: int = 0
    tokens: int = 0
    """Their prompt tokens."""


class Status(msgspec.Struct, frozen=True):
    """Everything `/status` says."""

    version: str
    ranks: tuple[RankStatus, ...]
    groups: tuple[GroupStatus, ...]
    targets: TargetsStatus | None = None
    held: HeldStatus = HeldStatus()


async def read_status(session: aiohttp.ClientSession, admin_url: str) -> bytes:
    """The status as the gateway wrote it, JSON. Raises StatusError."""
    try:
        async with session.get(f"{admin_url}/status") as answer:
            answer.raise_for_status()
            return await read_at_most(answer.content, MAX_ANSWER_BYTES)
    except aiohttp.ClientResponseError as error:
        raise StatusError(
            f"{admin_url}/status answers {error.status}: is that the gateway's admin API?"
        ) from None
    except TooLong as error:
        raise StatusError(f"{admin_url}/status is {error}: is that the gateway's admin API?") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StatusError(
            f"no gateway at {admin_url} ({_reason(error)}): is `wavegate up` running, and is this its admin "
            "address (-c FILE, --admin URL)?"
        ) from None


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
