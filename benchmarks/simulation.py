"""One run in virtual time: a trace against simulated groups, decided by the objects that the gateway ships.

What the gateway learns, it learns as in production: from reports taken every now and then, some of which may
fail, and from the ends of its own requests. Deterministic for a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace

from benchmarks.traces import BLOCK_TOKENS, TraceRequest
from ext_proc.admission import Admission
from ext_proc.decision import Placed, Refused
from ext_proc.groups import GroupFacts
from ext_proc.ledger import Ledger
from ext_proc.picker import Picker
from ext_proc.policies import make_policy
from ext_proc.reservation import Outcome, Reservation
from ext_proc.settings import AdmissionSettings, LedgerSettings, Targets
from ext_proc.step_times import StepCosts, StepTimes
from ext_proc.vocabulary import CallKind, Rank, RankCounters, RankReport, RequestFacts
from ext_proc.waiting_room import Held
from vllm_ranks.engine.rank_metrics import RankMetrics
from vllm_ranks.engine.request import EngineRequest
from vllm_ranks.engine.scheduler import SchedulerLimits
from vllm_ranks.engine.time_model import StepTimeModel
from vllm_ranks.engine.virtual import VirtualEngine
from vllm_ranks.engine.virtual_events import Finished, FirstToken, GroupSpec, TracedStep, VirtualEvent

MAX_MODEL_LEN = 262_144


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the simulated operator runs."""

    groups: int = 1
    ranks: int = 8
    """Per group."""
    lock_step: bool = True
    budget_tokens: int = 2048
    """The engines' `max_num_batched_tokens`."""
    max_num_seqs: int = 256
    kv_tokens: int = 2_000_000
    """Per rank."""
    prefill_schedule_interval: int = 1
    long_prefill_token_threshold: int = 0
    """The engines' limit on the tokens of one prompt in a step; 0: none."""
    time_model: StepTimeModel = field(default_factory=StepTimeModel)
    slow_ranks: dict[int, float] = field(default_factory=dict)
    """Slow-down factor by rank, over all groups."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How well the simulated gateway sees."""

    scrape_interval_s: float = 0.1
    scrape_jitter_ratio: float = 0.2
    scrapes_fail: tuple[float, float] = (0.0, 0.0)
    """From when to when no rank answers a scrape."""
    token_estimate_factor: float = 1.0
    """Prompt lengths are believed to be this many times what they are."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """How the simulated gateway decides."""

    policy: str = "lockstep"
    targets: Targets = field(default_factory=Targets)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    prior: StepCosts = field(default_factory=StepCosts)
    budget_is_known: bool = True


@dataclass(slots=True)
class Served:
    """What became of one request of the trace."""

    request: TraceRequest
    rank: str | None = None
    held_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    refused: bool = False

    @property
    def ttft_s(self) -> float | None:
        """From arrival at the gateway to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; 0 for a single token."""
        if self.first_token_s is None or self.finished_s is None:
            return None
        return (self.finished_s - self.first_token_s) / max(1, self.request.output_tokens - 1)


@dataclass(slots=True)
class RunRecord:
    """Everything one run tells."""

    served: list[Served]
    lost_share: float
    """Share of the ranks' stepping time spent waiting for the slowest, the mean over groups."""
    steps: list[list[TracedStep]]
    """Of each group, if traced."""


def simulate(
    trace: Sequence[TraceRequest],
    deployment: Deployment,
    gateway: Gateway,
    observation: Observation = Observation(),
    *,
    seed: int = 0,
    record_steps: bool = False,
) -> RunRecord:
    """Run a trace, in order of arrival, to its last token."""
    run = _Run(trace, deployment, gateway, observation, seed=seed, record_steps=record_steps)
    run.play()
    engine = run.engine
    return RunRecord(
        served=run.served,
        lost_share=sum(map(engine.lost_share, range(deployment.groups))) / deployment.groups,
        steps=[engine.steps(group) for group in range(deployment.groups)] if record_steps else [],
    )


class _Run:
    """The gateway, the engines and the clock of one run."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        deployment: Deployment,
        gateway: Gateway,
        observation: Observation,
        *,
        seed: int,
        record_steps: bool,
    ) -> None:
        self.served = [Served(request) for request in trace]
        self.engine = VirtualEngine(list(_group_specs(deployment)), seed=seed, trace=record_steps)
        self._deployment = deployment
        self._observation = observation
        self._rng = random.Random(seed)
        self._ranks = [
            Rank(f"g{group}", index, f"10.{group // 256}.{group % 256}.1:{8000 + index}")
            for group in range(deployment.groups)
            for index in range(deployment.ranks)
        ]
        self._place = {rank: divmod(n, deployment.ranks) for n, rank in enumerate(self._ranks)}
        budget = deployment.budget_tokens
        self.ledger = Ledger(
            self._ranks,
            {
                f"g{group}": GroupFacts(
                    f"g{group}",
                    lock_step=deployment.lock_step and deployment.ranks > 1,
                    times=StepTimes(gateway.prior, budget, budget_is_known=gateway.budget_is_known),
                )
                for group in range(deployment.groups)
            },
            LedgerSettings(block_tokens=BLOCK_TOKENS),
            gateway.targets,
        )
        policy = make_policy(gateway.policy)
        picker = Picker(self.ledger, policy, pick_list_length=1, rng=random.Random(seed + 1))
        self._admission = Admission(self.ledger, picker, gateway.admission)
        self._reservations: dict[str, Reservation] = {}
        self._waiting: dict[str, Held] = {}
        self._scrapes = [
            (observation.scrape_interval_s * self._rng.random(), n) for n in range(len(self._ranks))
        ]
        heapify(self._scrapes)

    def play(self) -> None:
        """Let arrivals, scrapes, wake-ups and engines happen in the order of time, until all is done."""
        arrivals = iter(range(len(self.served)))
        next_arrival = next(arrivals, None)
        wake_s: float | None = None
        while next_arrival is not None or self._reservations or self._waiting:
            arrival_s = float("inf")
            if next_arrival is not None:
                arrival_s = self.served[next_arrival].request.at_s
            scrape_s = self._scrapes[0][0]
            now_s = min(arrival_s, scrape_s, float("inf") if wake_s is None else wake_s)
            for event in self.engine.advance_to(now_s):
                self._on_event(event)
            if now_s == arrival_s and next_arrival is not None:
                self._arrive(next_arrival, now_s)
                next_arrival = next(arrivals, None)
            elif now_s == scrape_s:
                self._scrape(now_s)
            else:
                self._admission.advance(now_s)
            self._submit_decided(now_s)
            if wake_s is None or now_s >= wake_s:
                wake_s = self._admission.next_wake_s(now_s)

    def _arrive(self, n: int, now_s: float) -> None:
        request = self.served[n].request
        facts = RequestFacts(
            kind=CallKind.CHAT,
            request_id=str(n),
            prompt_tokens=max(1, round(request.prompt_tokens * self._observation.token_estimate_factor)),
            prompt_blocks=request.blocks,
        )
        decision = self._admission.decide(facts, now_s)
        if isinstance(decision, Held):
            self._waiting[facts.request_id] = decision
        else:
            self._act(facts.request_id, decision, now_s)

    def _submit_decided(self, now_s: float) -> None:
        for held in self._admission.take_decided():
            request_id = held.facts.request_id
            assert held.decision is not None
            del self._waiting[request_id]
            self._act(request_id, held.decision, now_s)

    def _act(self, request_id: str, decision: Placed | Refused, now_s: float) -> None:
        n = int(request_id)
        served = self.served[n]
        if isinstance(decision, Refused):
            served.refused = True
            return
        served.rank = decision.pick.first.name
        served.held_s = now_s - served.request.at_s
        self._reservations[request_id] = decision.reservation
        group, rank = self._place[decision.pick.first]
        self.engine.submit(group, rank, _engine_request(request_id, served.request, n, now_s))

    def _on_event(self, event: VirtualEvent) -> None:
        now_s = event.at_s
        match event:
            case FirstToken():
                served = self.served[int(event.request_id)]
                served.first_token_s = now_s
                served.cached_tokens = event.cached_tokens
            case Finished():
                self.served[int(event.request_id)].finished_s = now_s
                self._reservations.pop(event.request_id).release(Outcome.ENDED, now_s)
            case _:
                self.served[int(event.request_id)].refused = True
                self._reservations.pop(event.request_id).release(Outcome.ENDED, now_s)

    def _scrape(self, now_s: float) -> None:
        _, n = self._scrapes[0]
        observation = self._observation
        jitter = 1 + observation.scrape_jitter_ratio * (2 * self._rng.random() - 1)
        heapreplace(self._scrapes, (now_s + observation.scrape_interval_s * jitter, n))
        rank = self._ranks[n]
        fails_from_s, fails_to_s = observation.scrapes_fail
        if fails_from_s <= now_s < fails_to_s:
            self.ledger.record_failed_scrape(rank)
        else:
            metrics = self.engine.metrics(*self._place[rank])
            self.ledger.record_report(rank, _report(metrics, self._deployment.kv_tokens, now_s))


def _group_specs(deployment: Deployment) -> Iterator[GroupSpec]:
    for group in range(deployment.groups):
        yield GroupSpec(
            ranks=deployment.ranks,
            lock_step=deployment.lock_step,
            limits=SchedulerLimits(
                max_num_seqs=min(deployment.max_num_seqs, deployment.budget_tokens),
                max_num_batched_tokens=deployment.budget_tokens,
                max_model_len=MAX_MODEL_LEN,
                prefill_schedule_interval=deployment.prefill_schedule_interval,
                long_prefill_token_threshold=deployment.long_prefill_token_threshold,
            ),
            num_blocks=deployment.kv_tokens // BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            time_model=deployment.time_model,
            rank_time_models={
                rank - group * deployment.ranks: replace(deployment.time_model, slowdown=factor)
                for rank, factor in deployment.slow_ranks.items()
                if group * deployment.ranks <= rank < (group + 1) * deployment.ranks
            },
        )


def _engine_request(request_id: str, request: TraceRequest, n: int, now_s: float) -> EngineRequest:
    blocks: tuple[object, ...] = request.blocks
    if not blocks:
        blocks = tuple((n, block) for block in range(request.prompt_tokens // BLOCK_TOKENS))
    return EngineRequest(
        request_id, now_s, request.prompt_tokens, request.output_tokens, prompt_block_hashes=blocks
    )


def _report(metrics: RankMetrics, kv_tokens: int, now_s: float) -> RankReport:
    return RankReport(
        taken_at_s=now_s,
        running=metrics.num_requests_running,
        waiting=metrics.num_requests_waiting,
        kv_cache_usage=metrics.kv_cache_usage_perc,
        counters=RankCounters(
            first_tokens=metrics.time_to_first_token_seconds_count,
            inter_token_sum_s=metrics.inter_token_latency_seconds_sum,
            inter_token_count=metrics.inter_token_latency_seconds_count,
            computed_prompt_tokens=metrics.prompt_tokens - metrics.prompt_tokens_cached,
        ),
        kv_capacity_tokens=kv_tokens,
    )
