"""The decision objects of a configuration, and what gives them a clock.

Builds; must never decide.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from ext_proc.admission import Admission
from ext_proc.decision import Decision, Held
from ext_proc.facts import BLOCK_TOKENS
from ext_proc.groups import GroupFacts
from ext_proc.ledger import Ledger
from ext_proc.picker import Picker
from ext_proc.policies import make_policy
from ext_proc.settings import AdmissionSettings, Affinity, LedgerSettings, Targets
from ext_proc.step_times import UNKNOWN_BUDGET_TOKENS, StepCosts, StepTimes
from ext_proc.vocabulary import RequestFacts
from gateway.config import Config, tokenizer_of
from gateway.config_gateway import GatewaySection
from gateway.config_groups import Group

log = logging.getLogger(__name__)


def build_ledger(config: Config) -> Ledger:
    """An empty ledger of the configured ranks."""
    reports = config.gateway.reports
    return Ledger(
        config.ranks(),
        {group.name: _group_facts(group) for group in config.groups},
        LedgerSettings(
            stale_after_s=reports.stale_after_s,
            down_after_failures=reports.down_after_failures,
            block_tokens=BLOCK_TOKENS,
            max_sessions=config.gateway.sessions.max_sessions,
        ),
        _targets(config),
    )


def build_admission(config: Config, ledger: Ledger) -> Admission:
    """The configured policy and admission over a ledger."""
    settings, section = config.gateway, config.gateway.admission
    policy = make_policy(settings.policy)
    picker = Picker(
        ledger,
        policy,
        pick_list_length=settings.pick_list_length,
        rng=random.Random(),
        affinity=_affinity(settings) if policy.in_seconds else None,
        on_policy_failure=_PolicyFailures(settings.policy),
    )
    return Admission(
        ledger,
        picker,
        AdmissionSettings(
            phases=section.phases,
            phases_from_requests_per_rank=section.phases_from_requests_per_rank,
            backlog_s=section.backlog_ms / 1000,
            max_hold_s=section.max_hold_s,
            max_held_requests=section.max_held_requests,
            max_held_tokens=section.max_held_tokens,
            targets=_targets(config),
            explains_all=settings.log_decisions,
        ),
    )


class _PolicyFailures:
    """Logs the first failure of a policy; `wavegate_picks_total` counts them all."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._is_known = False

    def __call__(self, error: Exception) -> None:
        if not self._is_known:
            self._is_known = True
            log.error("policy %s fails: requests go where the fewest are", self._policy, exc_info=error)


class LiveAdmission:
    """Admission in wall-clock time: decides when asked, and again at every tick while requests are held."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.wake: Callable[[Held], None] = lambda held: None
        """Told each held request once it has been decided."""
        self._timer: asyncio.TimerHandle | None = None

    def decide(self, facts: RequestFacts, now_s: float) -> Decision:
        """Decide about a request that has just arrived."""
        decision = self.admission.decide(facts, now_s)
        self._after_deciding(now_s)
        return decision

    def _after_deciding(self, now_s: float) -> None:
        for held in self.admission.take_decided():
            self.wake(held)
        wake_s = self.admission.next_wake_s(now_s)
        if wake_s is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wake_s - now_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        self.admission.advance(now_s)
        self._after_deciding(now_s)


def _targets(config: Config) -> Targets:
    section = config.gateway.targets
    return Targets(ttft_s=section.ttft_ms / 1e3, tpot_s=section.tpot_ms / 1e3)


def _affinity(settings: GatewaySection) -> Affinity:
    return Affinity(
        session_bound_s=settings.sessions.bound_ms / 1e3, adapter_bound_s=settings.adapters.bound_ms / 1e3
    )


def _group_facts(group: Group) -> GroupFacts:
    prior = StepCosts(
        fixed_s=group.step_time.fixed_ms / 1e3,
        per_prefill_token_s=group.step_time.prefill_us_per_token / 1e6,
        per_decode_sequence_s=group.step_time.decode_us_per_sequence / 1e6,
        per_kv_token_s=group.step_time.kv_ns_per_token / 1e9,
    )
    budget_tokens = group.max_num_batched_tokens
    return GroupFacts(
        name=group.name,
        lock_step=group.lock_step and len(group.ranks()) > 1,
        times=StepTimes(
            prior,
            budget_tokens or UNKNOWN_BUDGET_TOKENS,
            budget_is_known=budget_tokens is not None,
        ),
        by_tokens=tokenizer_of(group) is not None,
        models=(group.model, *group.other_names),
    )
