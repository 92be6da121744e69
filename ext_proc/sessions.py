"""Which rank served each session last, in bounded memory. Pure; must never hold a session's name."""

from __future__ import annotations

from ext_proc.accounts import RankAccount


class Sessions:
    """The sessions of one gateway; those without a request for longest are forgotten first."""

    __slots__ = ("_last", "_max_sessions")

    def __init__(self, max_sessions: int) -> None:
        """Remember at most `max_sessions`, each by a hash of its name: about 150 bytes."""
        self._max_sessions = max_sessions
        self._last: dict[int, RankAccount] = {}

    def __len__(self) -> int:
        return len(self._last)

    def last(self, session: int | None) -> RankAccount | None:
        """Where the last request of the session was placed; `None` if that is not known."""
        return None if session is None else self._last.get(session)

    def note(self, session: int, account: RankAccount) -> None:
        """A request of the session is placed on this rank."""
        self._last.pop(session, None)
        if len(self._last) >= self._max_sessions:
            del self._last[next(iter(self._last))]
        self._last[session] = account
