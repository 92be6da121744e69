"""The gateway's own Prometheus metrics: what it picked, what it holds, how old its picture is.

Counts picks as they happen; everything else is read from the ledger when somebody scrapes. Label values come
from the configuration alone, never from a client.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ext_proc.admission import Admission
from ext_proc.decision import Placed, Refused
from ext_proc.ledger import Ledger
from ext_proc.usage import Usage
from ext_proc.vocabulary import Rank, RankState

HOLD_BUCKETS_S = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PICK_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class Telemetry:
    """Owns the registry that `/metrics` exposes."""

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self._picks = Counter(
            "wavegate_picks",
            "Requests placed, by rank picked first and reason.",
            ["rank", "reason"],
            registry=self.registry,
        )
        self._pick_seconds = Histogram(
            "wavegate_pick_seconds",
            "Time to read a request and decide.",
            buckets=PICK_BUCKETS_S,
            registry=self.registry,
        )
        self._hold_seconds = Histogram(
            "wavegate_hold_seconds",
            "Time that requests waited in the gateway before they were placed.",
            buckets=HOLD_BUCKETS_S,
            registry=self.registry,
        )
        self._refused = Counter(
            "wavegate_refused",
            "Requests the gateway answered itself, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._responses = Counter(
            "wavegate_responses",
            "Responses that passed by (endpoint-picker mode), by rank and class of status.",
            ["rank", "status"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "wavegate_response_tokens",
            "Tokens that responses say they took (endpoint-picker mode), by kind.",
            ["rank", "kind"],
            registry=self.registry,
        )
        self._scrapes = Counter(
            "wavegate_scrapes",
            "Scrapes of ranks, by result.",
            ["rank", "result"],
            registry=self.registry,
        )
        self.registry.register(_LedgerCollector(ledger, admission))

    def on_placed(self, placed: Placed, duration_s: float) -> None:
        """Count a pick, and how long the request was held before it."""
        self._picks.labels(placed.pick.first.name, placed.pick.reason.value).inc()
        self._pick_seconds.observe(duration_s)
        self._hold_seconds.observe(placed.held_s)

    def on_refused(self, refused: Refused) -> None:
        """Count a request that was refused."""
        self._refused.labels(refused.reason.value).inc()

    def on_response(self, rank: Rank, status: int | None, usage: Usage | None) -> None:
        """Count a response, and the tokens it says it took."""
        known = status is not None and 100 <= status <= 599
        self._responses.labels(rank.name, f"{status // 100}xx" if status and known else "none").inc()
        if usage is not None:
            self._tokens.labels(rank.name, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(rank.name, "completion").inc(usage.completion_tokens)

    def on_scrape(self, rank: Rank, *, succeeded: bool) -> None:
        """Count a scrape."""
        self._scrapes.labels(rank.name, "ok" if succeeded else "failed").inc()


class _LedgerCollector(Collector):
    """Gauges computed from the decision's objects at the moment of a scrape."""

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        now_s = time.monotonic()
        yield from self._of_ranks(now_s)
        yield from self._of_groups()
        admission = self._admission
        yield GaugeMetricFamily(
            "wavegate_held_requests", "Requests waiting in the gateway.", value=admission.held_requests
        )
        yield GaugeMetricFamily(
            "wavegate_held_prompt_tokens", "Prompt tokens of those that wait.", value=admission.held_tokens
        )
        yield GaugeMetricFamily(
            "wavegate_sessions", "Sessions whose last rank is remembered.", value=len(self._ledger.sessions)
        )

    def _of_ranks(self, now_s: float) -> Iterator[GaugeMetricFamily]:
        ledger = self._ledger
        reservations = _by("rank", "wavegate_reservations", "Requests placed and not yet ended.")
        unobserved = _by(
            "rank",
            "wavegate_unobserved_reservations",
            "Reservations whose end only the rank's reports can show.",
        )
        report_age = _by("rank", "wavegate_report_age_seconds", "Age of the rank's last report.")
        load = _by("rank", "wavegate_expected_load", "Requests the ledger expects on the rank.")
        states: Tally[RankState] = Tally()
        for account, expected in zip(ledger.accounts, ledger.loads(now_s), strict=True):
            name = [account.rank.name]
            reservations.add_metric(name, account.reservations)
            unobserved.add_metric(name, len(account.unobserved))
            load.add_metric(name, expected)
            if account.report is not None:
                report_age.add_metric(name, now_s - account.report.taken_at_s)
            states[ledger.state(account, now_s)] += 1
        ranks = _by("state", "wavegate_ranks", "Ranks by state of their reports.")
        for state in RankState:
            ranks.add_metric([state.value], states[state])
        yield from (reservations, unobserved, report_age, load, ranks)

    def _of_groups(self) -> Iterator[Metric]:
        healthy = _by("group", "wavegate_group_healthy", "1 if the group is in rotation.")
        steps = GaugeMetricFamily(
            "wavegate_step_seconds",
            "Length of an engine step at the present load: one that only decodes, one with a full chunk.",
            labels=["group", "kind"],
        )
        budget = _by("group", "wavegate_budget_tokens", "Token budget of the engine's steps.")
        prefilling = _by("group", "wavegate_group_prefilling", "1 while some rank of the group prefills.")
        lead = _by("group", "wavegate_lead_tokens", "Lead of decoding on the TPOT target, in tokens.")
        blocks = _by("group", "wavegate_prefix_index_blocks", "Prompt blocks in the prefix indexes.")
        size = _by("group", "wavegate_prefix_index_bytes", "Memory of the prefix indexes.")
        prompts = CounterMetricFamily(
            "wavegate_token_prompts",
            "Prompts known as tokens that ranks have computed, by whether they then said they hold them.",
            labels=["group", "result"],
        )
        for group in self._ledger.groups:
            name = [group.name]
            healthy.add_metric(name, float(group.is_healthy and group.in_rotation))
            steps.add_metric([group.name, "decode"], group.decode_step_s)
            steps.add_metric([group.name, "prefill"], group.prefill_step_s)
            budget.add_metric(name, group.times.budget_tokens)
            prefilling.add_metric(name, float(group.is_prefilling))
            lead.add_metric(name, group.lead.tokens)
            blocks.add_metric(name, sum(len(account.cache) for account in group.accounts))
            size.add_metric(name, sum(account.cache.memory_bytes() for account in group.accounts))
            found = sum(account.cache.prompts_found for account in group.accounts)
            missing = sum(account.cache.prompts_missing for account in group.accounts)
            prompts.add_metric([group.name, "found"], found)
            prompts.add_metric([group.name, "missing"], missing)
        yield from (healthy, steps, budget, prefilling, lead, blocks, size, prompts)


def _by(label: str, name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, labels=[label])
