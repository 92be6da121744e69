"""What the ledger knows of one group: its step times, its pace, and whether it prefills just now.

A lock-step group has one clock: every step takes as long as its slowest rank's, and gives every decoding
request one token. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from ext_proc.accounts import RankAccount
from ext_proc.settings import Targets
from ext_proc.step_times import StepTimes
from ext_proc.token_lead import TokenLead
from ext_proc.vocabulary import RankCounters

QUIET_SHARE = 0.1
"""Prefill that lengthens a step by up to this share does not keep the step from being learned from."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a configuration says of a group."""

    name: str
    lock_step: bool
    """Whether its ranks step together: a MoE data-parallel group of more than one rank."""
    times: StepTimes
    """Prior of its step times."""
    by_tokens: bool = False
    """Whether prompts for it are known as tokens."""
    models: tuple[str, ...] = ()
    """Names by which clients ask for what it serves, the model's own first; none: it serves any."""


class GroupAccount:
    """One group: one failure domain, one clock."""

    __slots__ = (
        "_disturbed_s",
        "_load_at_s",
        "_now_s",
        "_prefill_share",
        "_saturated_since_s",
        "_stale_after_s",
        "accounts",
        "by_tokens",
        "decode_step_s",
        "decoding_sequences",
        "guesses",
        "in_rotation",
        "is_prefilling",
        "lead",
        "learned_s",
        "lock_step",
        "longest_kv_tokens",
        "models",
        "name",
        "observed_until_s",
        "prefill_step_s",
        "prefill_tokens_per_s",
        "ranks_down",
        "sequences",
        "steps",
        "targets",
        "times",
    )

    LOAD_REFRESH_S = 0.05
    """How long the loads that step times depend on are used before they are looked at again."""
    LEARN_EVERY_S = 0.05
    """Steps are learned from so often; all ranks report the same ones."""
    RECENT_S = 5.0
    """How far back the share of time spent on prefill reaches: about as long as a request decodes."""

    def __init__(self, facts: GroupFacts, targets: Targets, *, stale_after_s: float) -> None:
        self.name = facts.name
        self.lock_step = facts.lock_step
        self.times = facts.times
        self.by_tokens = facts.by_tokens
        self.models = facts.models
        self.targets = targets
        self.accounts: list[RankAccount] = []
        self.in_rotation = True
        """Whether it may get new requests, as far as those decide who watch and restart it."""
        self.ranks_down = 0
        self.lead = TokenLead()
        self.steps = 0.0
        """Steps done so far, by the model of step times; only differences mean something."""
        self.decoding_sequences = 0
        """Of the rank that has most."""
        self.sequences = 0
        """Decoding on all ranks together, those of other clients included."""
        self.longest_kv_tokens = 0.0
        """Resident KV tokens of the rank that has most."""
        self.is_prefilling = False
        """Whether a phase is under way."""
        self.observed_until_s = float("-inf")
        """Until when it counts what ranks have told of how far their requests have come."""
        self.guesses = 0
        """Open reservations whose first token was assumed, not reported: they may still prefill."""
        self.learned_s = float("-inf")
        """When a step of this group was last learned from."""
        self._disturbed_s = float("-inf")
        self._prefill_share = 0.0
        self._saturated_since_s: float | None = None
        self._now_s = 0.0
        self._stale_after_s = stale_after_s
        self._load_at_s = float("-inf")
        self.decode_step_s = 0.0
        """A step while nobody prefills."""
        self.prefill_step_s = 0.0
        """A step while somebody computes full chunks of prompts."""
        self.prefill_tokens_per_s = 0.0
        """Prompt tokens a rank computes in a second while it prefills."""
        self._refresh_steps()

    @property
    def is_healthy(self) -> bool:
        """Whether it may get requests: a group is one failure domain, so every rank must be up."""
        return self.ranks_down == 0

    @property
    def recent_step_s(self) -> float:
        """The mean step, if the group goes on to prefill as much of the time as it lately did."""
        share = self._prefill_share
        return 1.0 / (share / self.prefill_step_s + (1.0 - share) / self.decode_step_s)

    def longest_prefill_tokens(self, now_s: float) -> float:
        """Prompt tokens ahead of the rank that has most: when it is done, the phase ends."""
        rate = self.prefill_tokens_per_s
        return max(account.prefills.remaining_tokens(now_s, rate) for account in self.accounts)

    # --- Written by the ledger -----------------------------------------------------------------------

    def pass_time(self, now_s: float) -> None:
        """Account for the steps since the last call."""
        elapsed_s = now_s - self._now_s
        if elapsed_s <= 0:
            return
        self._now_s = now_s
        step_s = self.prefill_step_s if self.is_prefilling else self.decode_step_s
        self.steps += elapsed_s / step_s
        weight = 1.0 - exp(-elapsed_s / self.RECENT_S)
        self._prefill_share += weight * (self.is_prefilling - self._prefill_share)
        if now_s - self._load_at_s >= self.LOAD_REFRESH_S:
            self._refresh_load(now_s)
        if not self.sequences:
            self.lead.reset()

    def note_phase(self, now_s: float) -> None:
        """The prefills ahead of some rank have changed: a phase may have begun or ended."""
        if self._is_disturbed():
            self._disturbed_s = now_s
        self.is_prefilling = any(account.prefills for account in self.accounts)
        self._refresh_load(now_s)

    def note_tokens(self, before: RankCounters, after: RankCounters, now_s: float) -> None:
        """One rank's requests have got tokens between two of its reports."""
        self.observed_until_s = now_s + self._stale_after_s
        tokens = after.inter_token_count - before.inter_token_count
        waited_s = after.inter_token_sum_s - before.inter_token_sum_s
        if tokens > 0 and self.sequences:
            self.lead.record(tokens, waited_s, sequences=self.sequences, target_s=self.targets.tpot_s)

    def learn_step(self, before: RankCounters, after: RankCounters, since_s: float, now_s: float) -> None:
        """Learn from the tokens that one rank's requests got between two of its reports.

        The mean time between tokens is the step time, if the group did one thing all along.
        """
        tokens = after.inter_token_count - before.inter_token_count
        if tokens <= 0 or now_s < self.learned_s + self.LEARN_EVERY_S:
            return
        step_s = (after.inter_token_sum_s - before.inter_token_sum_s) / tokens
        if step_s <= 0:
            return
        load = (self.decoding_sequences, self.longest_kv_tokens)
        if self._is_disturbed():
            self._disturbed_s = now_s
        only_decoded = self._disturbed_s < since_s and self._sees_all()
        # Whatever is believed to go on, nothing but decoding makes a step that short.
        if only_decoded or step_s < self.decode_step_s:
            self.times.observe_decode_step(step_s, *load)
            self.learned_s = now_s
            self._refresh_steps()
        elif self._saturated_since_s is not None and self._saturated_since_s < since_s:
            self.times.observe_prefill_step(step_s, *load)
            self._refresh_steps()

    def learn_prefill(self, tokens: int, duration_s: float) -> None:
        """Learn from a prefill that a rank began when it had nothing else ahead, or right after another."""
        self.times.observe_prefill(tokens, duration_s, self.decoding_sequences, self.longest_kv_tokens)
        self._refresh_steps()

    def _sees_all(self) -> bool:
        """Whether nothing may prefill without being known here."""
        return self.guesses == 0 and not any(account.foreign_requests for account in self.accounts)

    def _is_disturbed(self) -> bool:
        """Whether prefill is under way that makes steps noticeably longer than those that only decode."""
        tokens = max(account.prefills.tokens for account in self.accounts)
        return tokens * self.times.costs.per_prefill_token_s > QUIET_SHARE * self.decode_step_s

    def _refresh_load(self, now_s: float) -> None:
        self._load_at_s = now_s
        self.sequences = sum(
            account.decoding_sequences + account.foreign_requests for account in self.accounts
        )
        self.decoding_sequences = max(account.decoding_sequences for account in self.accounts)
        self.longest_kv_tokens = max(account.resident_kv_tokens(self.steps) for account in self.accounts)
        self._refresh_steps()
        full_chunks = self.is_prefilling and self.longest_prefill_tokens(now_s) > self.times.budget_tokens
        if not full_chunks:
            self._saturated_since_s = None
        elif self._saturated_since_s is None:
            self._saturated_since_s = now_s

    def _refresh_steps(self) -> None:
        """Work out what follows from step times and load: to be called when one of the two has changed."""
        load = (self.decoding_sequences, self.longest_kv_tokens)
        self.decode_step_s = self.times.decode_step_s(*load)
        self.prefill_step_s = self.times.prefill_step_s(*load)
        self.prefill_tokens_per_s = self.times.budget_tokens / self.prefill_step_s
