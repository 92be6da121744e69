"""What fits where: which ranks could take a prompt at one moment, and how long a one.

A rank is closed to a prompt while it is out of KV memory, or while its group waits for a phase; it is busy
while it has a backlog. Must never decide who goes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from ext_proc.accounts import RankAccount
from ext_proc.groups import GroupAccount
from ext_proc.ledger import Ledger
from ext_proc.phases import PhaseGate
from ext_proc.picker import Readiness
from ext_proc.settings import AdmissionSettings
from ext_proc.vocabulary import RankState


class Openings:
    """The openings of all ranks of a ledger at `now_s`."""

    def __init__(
        self,
        ledger: Ledger,
        gates: Mapping[GroupAccount, PhaseGate],
        settings: AdmissionSettings,
        now_s: float,
    ) -> None:
        self._ledger = ledger
        self._settings = settings
        self._now_s = now_s
        self._rooms = {
            group: gate.room_tokens(now_s) for group, gate in gates.items() if not gate.is_open(now_s)
        }
        """For groups where prefill must not start at any time: how many tokens a rank may have to compute."""
        self._is_ready: dict[RankAccount, bool] = {}
        self._longest: dict[GroupAccount, float | None] = {}

    def is_any(self) -> bool:
        """Whether a rank takes any prompt."""
        return any(self._longest_of(group) is not None for group in self._ledger.groups)

    def longest_tokens(self, groups: Iterable[GroupAccount]) -> float | None:
        """The longest prompt that a rank of these takes, in uncached tokens; `None`: none takes any."""
        return max((one for group in groups if (one := self._longest_of(group)) is not None), default=None)

    def note_placed(self, account: RankAccount) -> None:
        """A request has been placed on a rank."""
        self._is_ready.pop(account, None)
        self._longest.pop(account.group, None)

    def is_ready(self, account: RankAccount) -> bool:
        """Whether a rank takes any prompt."""
        ready = self._is_ready.get(account)
        if ready is None:
            ready = self._is_ready[account] = self.readiness(account, 0) is Readiness.READY
        return ready

    def readiness(self, account: RankAccount, uncached_tokens: int) -> Readiness:
        """Whether a rank may be given a prompt of so many uncached tokens."""
        if self.is_full(account):
            return Readiness.CLOSED
        ahead = self._ahead_tokens(account)
        if ahead + uncached_tokens > self._rooms.get(account.group, inf):
            return Readiness.CLOSED
        most = self._settings.backlog_s * account.group.prefill_tokens_per_s
        return Readiness.READY if ahead <= most else Readiness.BUSY

    def is_full(self, account: RankAccount) -> bool:
        """Whether the rank itself says, and lately, that requests queue for KV memory."""
        report, settings = account.report, self._settings
        return (
            report is not None
            and report.kv_cache_usage >= settings.full_kv_usage
            and report.waiting > 0
            and self._ledger.state(account, self._now_s) is RankState.FRESH
        )

    def _longest_of(self, group: GroupAccount) -> float | None:
        if group not in self._longest:
            ready = filter(self.is_ready, group.accounts)
            room = self._rooms.get(group)
            if room is None:
                self._longest[group] = inf if any(ready) else None
            else:
                self._longest[group] = max((room - self._ahead_tokens(one) for one in ready), default=None)
        return self._longest[group]

    def _ahead_tokens(self, account: RankAccount) -> float:
        return account.prefills.remaining_tokens(self._now_s, account.group.prefill_tokens_per_s)
