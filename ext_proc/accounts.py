"""What the ledger knows of one rank: requests placed on it, what it reports, what its cache holds.

Policies and admission read an account; only the ledger writes it. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ext_proc.prefill_queue import PrefillQueue
from ext_proc.rank_cache import RankCache
from ext_proc.settings import LedgerSettings
from ext_proc.vocabulary import Rank, RankReport

if TYPE_CHECKING:
    from ext_proc.groups import GroupAccount
    from ext_proc.reservation import Reservation


class RankAccount:
    """One rank."""

    __slots__ = (
        "_own_peak",
        "_own_peak_before",
        "_step_offsets",
        "adapters",
        "cache",
        "decoding_sequences",
        "failures_in_a_row",
        "foreign_requests",
        "group",
        "kv_capacity_tokens",
        "open",
        "pick_sequence",
        "picks",
        "picks_since_report",
        "prefills",
        "prompt_tokens_open",
        "rank",
        "report",
        "unobserved",
    )

    def __init__(self, rank: Rank, group: GroupAccount, settings: LedgerSettings) -> None:
        self.rank = rank
        self.group = group
        self.open: dict[Reservation, None] = {}
        """Open reservations, in the order of their placing."""
        self.picks = 0
        """Reservations ever taken."""
        self.picks_since_report = 0
        self.pick_sequence = 0
        """Position of the last pick of this rank among all picks; orders equals fairly."""
        self.prefills: PrefillQueue[Reservation] = PrefillQueue()
        """Requests placed here that have not had their first token."""
        self.decoding_sequences = 0
        """Sequences of requests placed here that have had their first token."""
        self.prompt_tokens_open = 0
        """Prompt tokens of all open reservations."""
        self.cache = RankCache(
            by_tokens=group.by_tokens,
            text_block_tokens=settings.block_tokens,
            max_blocks=settings.index_blocks,
        )
        self.kv_capacity_tokens: int | None = None
        """Size of the KV cache, once the rank has reported it."""
        self.report: RankReport | None = None
        self.foreign_requests = 0
        """Requests in the last report that this gateway's own reservations do not explain."""
        self.adapters: frozenset[str] = frozenset()
        """LoRA adapters that it runs, by its last report."""
        self.failures_in_a_row = 0
        self.unobserved: deque[tuple[float, Reservation]] = deque()
        """Open reservations whose streams have ended, with the time since when, oldest first."""
        self._step_offsets = 0.0
        self._own_peak = 0
        self._own_peak_before = 0

    @property
    def reservations(self) -> int:
        """How many reservations are open: requests this gateway sent and has not seen end."""
        return len(self.open)

    def placed_after_s(self, time_s: float) -> float | None:
        """When the oldest of its open requests came that came after `time_s`; `None`: none did."""
        return next((one.placed_at_s for one in self.open if one.placed_at_s > time_s), None)

    def resident_kv_tokens(self, group_steps: float) -> float:
        """KV tokens of own requests: their prompts, and a token per step since each began to decode."""
        return self.prompt_tokens_open + self.decoding_sequences * group_steps - self._step_offsets

    # --- Written by the ledger -----------------------------------------------------------------------

    def open_one(self, reservation: Reservation, pick_sequence: int) -> None:
        """Count one more reservation, the `pick_sequence`-th of the ledger."""
        self.open[reservation] = None
        self.picks += 1
        self.picks_since_report += 1
        self.pick_sequence = pick_sequence
        self.prompt_tokens_open += reservation.facts.prompt_tokens
        self._own_peak = max(self._own_peak, self.reservations)

    def close_one(self, reservation: Reservation) -> None:
        """Count one reservation less."""
        del self.open[reservation]
        self.prompt_tokens_open -= reservation.facts.prompt_tokens

    def forget_unobserved(self, reservation: Reservation) -> bool:
        """That reservation's end is no longer this rank's to show; whether it was."""
        kept = [entry for entry in self.unobserved if entry[1] is not reservation]
        was_there = len(kept) < len(self.unobserved)
        self.unobserved = deque(kept)
        return was_there

    def start_decoding(self, sequences: int, group_steps: float) -> None:
        """A request has had its first token."""
        self.decoding_sequences += sequences
        self._step_offsets += sequences * group_steps

    def stop_decoding(self, sequences: int, started_at_step: float) -> None:
        """A request that had begun to decode at that step has ended."""
        self.decoding_sequences -= sequences
        self._step_offsets -= sequences * started_at_step

    def record_report(self, report: RankReport) -> None:
        """Take in what the rank says.

        An engine's gauges lag by a step or more, so a request that has just ended may still be in them. What
        counts as foreign is therefore only what exceeds the most reservations open since the report before.
        """
        explained = max(self._own_peak, self._own_peak_before)
        self.foreign_requests = max(0, report.running + report.waiting - explained)
        self._own_peak_before, self._own_peak = self._own_peak, self.reservations
        self.picks_since_report = 0
        self.report = report
        self.adapters = report.adapters
        self.failures_in_a_row = 0
        if report.kv_capacity_tokens is not None and report.kv_capacity_tokens != self.kv_capacity_tokens:
            self.kv_capacity_tokens = report.kv_capacity_tokens
            self.cache.resize(report.kv_capacity_tokens, report.kv_block_tokens)
