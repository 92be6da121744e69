"""Whole groups of ranks in one process and in virtual time: thousands of simulated seconds in seconds.

Cores, coordinator and front ends are the state machines of the wall-clock engine, called in the order
in which `engine_loop` calls them; a heap of events takes the place of sockets and clock. Deterministic
for a seed. The coordinator's heartbeats are left out: they repeat what front ends know already.
Must never wait, and never read a clock.

    engine = VirtualEngine([GroupSpec(ranks=8)])
    engine.submit(0, 3, request, at_s=1.5)
    for event in engine.advance_to(60.0):
        ...  # engine.now_s is event.at_s: what is submitted or aborted here happens then
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

from vllm_ranks.engine.core import EngineCore, StepKind, StepWork
from vllm_ranks.engine.kv_cache import KVCache, KvEvent
from vllm_ranks.engine.plan import StepOutcome
from vllm_ranks.engine.queue_limits import QueueLimits
from vllm_ranks.engine.rank_metrics import RankMetrics
from vllm_ranks.engine.request import EngineRequest
from vllm_ranks.engine.scheduler import Scheduler
from vllm_ranks.engine.virtual_events import (
    Finished,
    FirstToken,
    GroupSpec,
    RankShare,
    Refused,
    TracedStep,
    VirtualEvent,
)
from vllm_ranks.engine.waves import (
    CoordinatorMessage,
    CoordinatorState,
    EngineMessage,
    FirstRequest,
    FrontEndWaves,
    StartDpWave,
    WaveComplete,
    WavePublication,
    WaveStarted,
    WaveState,
)

KvListener = Callable[[int, int, KvEvent], None]
"""Called with group, rank and event."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: EngineRequest
    wave: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


_EngineInput = _Add | _Abort | StartDpWave


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank: its engine core, its front end, and what lies between them."""

    group: int
    index: int
    core: EngineCore
    limits: QueueLimits
    coordinator: CoordinatorState | None
    """The group's; `None` for a rank without waves."""
    waves: FrontEndWaves = field(default_factory=FrontEndWaves)
    metrics: RankMetrics = field(default_factory=RankMetrics)
    under_way: dict[str, int] = field(default_factory=dict)
    """The front end's requests: prompt tokens until the first token, 0 from then on."""
    inbox: list[_EngineInput] = field(default_factory=list)
    """Inputs that came while a step was under way."""
    work: StepWork | None = None
    """Its part of the step under way, or of the next one if it waits for other ranks to begin."""


@dataclass(slots=True, eq=False)
class _Domain:
    """Ranks that step together."""

    ranks: list[_Rank]
    begun: int = 0
    """Ranks that are ready for the next step."""
    started_s: float = 0.0
    stepped_rank_s: float = 0.0
    busy_rank_s: float = 0.0
    trace: list[TracedStep] | None = None


class VirtualEngine:
    """Groups of ranks and the clock they share."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        seed: int = 0,
        message_delay_s: float = 0.0003,
        trace: bool = False,
        kv_listener: KvListener | None = None,
    ) -> None:
        """`message_delay_s`: one hop between front end, engine and coordinator.

        `trace` keeps a record of every step, so that memory grows with the simulated time.
        """
        self.now_s = 0.0
        self._delay_s = message_delay_s
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._events: deque[VirtualEvent] = deque()
        self._groups: list[list[_Rank]] = []
        self._domains: dict[_Rank, _Domain] = {}
        for group, spec in enumerate(groups):
            together = spec.lock_step and spec.ranks > 1
            coordinator = CoordinatorState(spec.ranks) if together else None
            ranks = [self._rank(group, r, spec, coordinator, seed, kv_listener) for r in range(spec.ranks)]
            self._groups.append(ranks)
            for members in [ranks] if together else [[rank] for rank in ranks]:
                domain = _Domain(members, trace=[] if trace else None)
                self._domains.update(dict.fromkeys(members, domain))

    @staticmethod
    def _rank(
        group: int,
        index: int,
        spec: GroupSpec,
        coordinator: CoordinatorState | None,
        seed: int,
        kv_listener: KvListener | None,
    ) -> _Rank:
        cache = KVCache(
            spec.num_blocks,
            spec.block_size,
            enable_prefix_caching=spec.enable_prefix_caching,
            listener=None if kv_listener is None else partial(kv_listener, group, index),
        )
        core = EngineCore(
            Scheduler(spec.limits, cache, spec.policy),
            spec.rank_time_models.get(index, spec.time_model),
            random.Random(f"{seed}/{group}/{index}"),
            None if coordinator is None else WaveState(index, spec.dp_sync_interval),
        )
        return _Rank(group, index, core, spec.queue_limits, coordinator)

    # --- For the user -------------------------------------------------------------------------------

    def submit(self, group: int, rank: int, request: EngineRequest, at_s: float | None = None) -> None:
        """A request reaches that rank's API server, now or at `at_s`. Ids must be unique within a rank."""
        self._at(self.now_s if at_s is None else at_s, self._receive, self._groups[group][rank], request)

    def abort(self, group: int, rank: int, request_id: str, at_s: float | None = None) -> None:
        """The client of a request goes away; there will be no more events of it."""
        self._at(self.now_s if at_s is None else at_s, self._cancel, self._groups[group][rank], request_id)

    def advance_to(self, at_s: float) -> Iterator[VirtualEvent]:
        """Let time pass, up to and including `at_s`; events come one by one, each at its time.

        The caller may submit and abort between two of them, and may stop reading: nothing is lost.
        """
        heap, events = self._heap, self._events
        while True:
            while events:
                yield events.popleft()
            if not heap or heap[0][0] > at_s:
                break
            self.now_s, _, handler, arguments = heappop(heap)
            handler(*arguments)
        self.now_s = max(self.now_s, at_s)

    def metrics(self, group: int, rank: int) -> RankMetrics:
        """What that rank's `/metrics` says right now: the live record, `snapshot()` keeps it."""
        return self._groups[group][rank].metrics

    def core(self, group: int, rank: int) -> EngineCore:
        """The rank itself, for a look behind its metrics; do not change it."""
        return self._groups[group][rank].core

    def steps(self, group: int, rank: int = 0) -> list[TracedStep]:
        """The steps that rank took part in; a lock-step group's are the same for every rank."""
        return self._domains[self._groups[group][rank]].trace or []

    def lost_share(self, group: int) -> float:
        """Share of its ranks' stepping time that a group spent waiting for the slowest, 0 to 1."""
        domains = set(map(self._domains.__getitem__, self._groups[group]))
        stepped_s = sum(domain.stepped_rank_s for domain in domains)
        return 1 - sum(domain.busy_rank_s for domain in domains) / stepped_s if stepped_s else 0.0

    # --- Front ends ---------------------------------------------------------------------------------

    def _receive(self, rank: _Rank, request: EngineRequest) -> None:
        limit = rank.limits.refusal(len(rank.under_way), sum(rank.under_way.values()))
        if limit is not None:
            self._events.append(Refused(self.now_s, rank.group, rank.index, request.request_id, limit))
            return
        rank.under_way[request.request_id] = request.prompt_tokens
        self._later(self._input, rank, _Add(request, rank.waves.current_wave))
        if rank.coordinator is not None:
            # Named by its socket identity, as vLLM's front ends do.
            first_request = rank.waves.on_request(rank.index.to_bytes(2, "little"))
            if first_request is not None:
                self._later(self._coordinate, rank, first_request)

    def _cancel(self, rank: _Rank, request_id: str) -> None:
        if rank.under_way.pop(request_id, None) is not None:
            self._later(self._input, rank, _Abort(request_id))

    def _report(self, rank: _Rank, work: StepWork, outcome: StepOutcome) -> None:
        """A rank's engine tells its front end what a step produced."""
        rank.metrics.observe(rank.core, work.plan, outcome, self.now_s)
        now_s, group, index, under_way = self.now_s, rank.group, rank.index, rank.under_way
        for sequence in outcome.prefilled:
            request_id = sequence.request.request_id
            if under_way.get(request_id):
                under_way[request_id] = 0
                self._events.append(FirstToken(now_s, group, index, request_id, sequence.cached_tokens))
        for sequence in outcome.finished:
            request_id = sequence.request.request_id
            if under_way.pop(request_id, None) is not None:
                assert sequence.first_token_s is not None
                self._events.append(
                    Finished(
                        now_s,
                        group,
                        index,
                        request_id,
                        sequence.finish_reason,
                        sequence.first_token_s,
                        sequence.generated_tokens,
                        sequence.cached_tokens,
                        sequence.preemptions,
                    )
                )

    # --- Engines ------------------------------------------------------------------------------------

    def _input(self, rank: _Rank, message: _EngineInput) -> None:
        """A message reaches an engine, which reads it between two steps."""
        rank.inbox.append(message)
        if rank.work is None:
            self._begin(self._domains[rank], rank)

    def _read_inbox(self, rank: _Rank) -> None:
        core = rank.core
        for message in rank.inbox:
            match message:
                case _Add(request, wave):
                    try:
                        core.add_request(request, self.now_s, wave)
                    except ValueError as error:
                        del rank.under_way[request.request_id]
                        refused = Refused(self.now_s, rank.group, rank.index, request.request_id, str(error))
                        self._events.append(refused)
                case _Abort(request_id):
                    core.abort([request_id])
                case StartDpWave(wave, exclude):
                    core.start_dp_wave(wave, exclude)
        rank.inbox.clear()
        self._send_messages(rank)

    def _begin(self, domain: _Domain, rank: _Rank) -> None:
        """The start of a rank's iteration; the last rank to begin starts the step."""
        if rank.inbox:
            self._read_inbox(rank)
        core = rank.core
        work = core.begin_step(self.now_s)
        while work is not None and work.kind is StepKind.FLUSH:
            outcome = core.end_step(work, self.now_s)
            if outcome is not None:
                self._report(rank, work, outcome)
            work = core.begin_step(self.now_s)
        if work is None:
            return
        rank.work = work
        domain.begun += 1
        if domain.begun == len(domain.ranks):
            costs = [member.work.cost_s for member in domain.ranks if member.work is not None]
            duration_s = max(costs)
            domain.started_s = self.now_s
            domain.busy_rank_s += sum(costs)
            domain.stepped_rank_s += duration_s * len(costs)
            if domain.trace is not None:
                domain.trace.append(_traced(domain, self.now_s, duration_s))
            self._at(self.now_s + duration_s, self._end, domain)

    def _end(self, domain: _Domain) -> None:
        """The step is over for all its ranks; each goes on with its next iteration."""
        domain.begun = 0
        now_s = self.now_s
        for rank in domain.ranks:
            work, rank.work = rank.work, None
            assert work is not None
            for message in rank.inbox:
                if isinstance(message, _Abort):  # takes effect before the step's outputs do
                    rank.core.abort([message.request_id])
            outcome = rank.core.end_step(work, now_s)
            if outcome is not None:
                self._report(rank, work, outcome)
        if domain.ranks[0].core.agreement_due:
            any_unfinished = any(rank.core.has_unfinished for rank in domain.ranks)
            for rank in domain.ranks:
                rank.core.agree(any_unfinished)
                self._send_messages(rank)
        for rank in domain.ranks:
            self._begin(domain, rank)

    def _send_messages(self, rank: _Rank) -> None:
        for message in rank.core.take_messages():
            self._later(self._coordinate, rank, message)

    # --- Coordinator --------------------------------------------------------------------------------

    def _coordinate(self, rank: _Rank, message: EngineMessage | FirstRequest) -> None:
        """A message of a rank's engine or front end reaches the coordinator."""
        coordinator = rank.coordinator
        assert coordinator is not None
        answers: list[CoordinatorMessage]
        match message:
            case FirstRequest():
                answers = coordinator.on_first_request(message, self.now_s)
            case WaveStarted(wave):
                answers = coordinator.on_engine_outputs(rank.index, self.now_s, start_wave=wave)
            case WaveComplete(wave):
                answers = coordinator.on_engine_outputs(rank.index, self.now_s, wave_complete=wave)
        for answer in answers:
            for member in self._groups[rank.group]:
                if isinstance(answer, StartDpWave):
                    self._later(self._input, member, answer)
                elif isinstance(answer, WavePublication):
                    self._later(member.waves.on_publication, answer)

    # --- Clock --------------------------------------------------------------------------------------

    def _at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        if at_s < self.now_s:
            raise ValueError(f"{at_s} s is in the past, it is {self.now_s} s")
        heappush(self._heap, (at_s, self._scheduled, handler, arguments))
        self._scheduled += 1

    def _later(self, handler: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now_s + self._delay_s, handler, *arguments)


def _traced(domain: _Domain, start_s: float, duration_s: float) -> TracedStep:
    shares = []
    for rank in domain.ranks:
        assert rank.work is not None
        plan = rank.work.plan
        shares.append(
            RankShare(
                rank.index,
                rank.work.cost_s,
                0 if plan is None else plan.prefill_tokens,
                0 if plan is None else plan.decode_sequences,
                None if plan is None else plan.record(),
            )
        )
    return TracedStep(start_s, duration_s, tuple(shares))
