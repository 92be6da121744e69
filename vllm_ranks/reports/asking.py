"""Asking one rank again and again, and reading no more of an answer than is meant to be there.

Whatever a rank answers, and whatever comes of it, must never end the asking, nor that of other ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from aiohttp import StreamReader

from ext_proc.vocabulary import Rank

log = logging.getLogger(__name__)

MAX_DESCRIPTION_CHARS = 300
"""An error may quote what a rank has answered."""


class TooLong(Exception):
    """There is more to read than may be read."""


async def read_at_most(content: StreamReader, limit_bytes: int) -> bytes:
    """All of a body, in however many pieces it arrives. Raises TooLong as soon as it exceeds the limit."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > limit_bytes:
            raise TooLong(f"longer than {limit_bytes} bytes")
    return bytes(body)


class UnexpectedErrors:
    """Errors that nobody foresaw while a rank was asked: each kind is logged once, with its traceback."""

    def __init__(self) -> None:
        self._logged: set[tuple[Rank, type[Exception]]] = set()

    def describe(self, rank: Rank, error: Exception) -> str:
        """The error in few words, for people."""
        kind = (rank, type(error))
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("rank %s: nobody expected this error; it is not shown again", rank.name, exc_info=error)
        return shortened(f"unexpected error: {type(error).__name__}: {error}")


def shortened(description: str) -> str:
    """What fits into a line of a log."""
    if len(description) <= MAX_DESCRIPTION_CHARS:
        return description
    return f"{description[:MAX_DESCRIPTION_CHARS]} …"


async def keep_asking(
    rank: Rank,
    ask: Callable[[], Awaitable[None]],
    *,
    failed: Callable[[str], None],
    pause_s: Callable[[], float],
) -> NoReturn:
    """Ask a rank until cancelled.

    Args:
        rank: who is asked.
        ask: asks once, and deals with what can be expected to go wrong.
        failed: told what else has gone wrong: the rank counts as one that did not answer.
        pause_s: how long to wait before it is asked again.
    """
    unexpected = UnexpectedErrors()
    while True:
        try:
            await ask()
        except Exception as error:
            failed(unexpected.describe(rank, error))
        await asyncio.sleep(pause_s())
