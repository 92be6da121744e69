"""One API server's half of serving, between HTTP and the engines: what vLLM calls AsyncLLM.

Assigns ids, enforces queue limits, sends requests, delivers outputs, records metrics, and knows when the
engine is dead (vLLM 0.32 vllm/v1/engine/async_llm.py). Must never see HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm_ranks.engine import wire
from vllm_ranks.engine.admission import AdmissionCounters
from vllm_ranks.engine.client import EngineClient, EngineDeadError
from vllm_ranks.engine.config import LoraModule, RankConfig
from vllm_ranks.engine.metrics import EngineMetrics
from vllm_ranks.engine.output_processor import Collector, OutputProcessor, Parent, SequenceRequest
from vllm_ranks.engine.queue_limits import QueueLimit, QueueLimits

_REFUSALS: dict[QueueLimit, str] = {
    "max_num_queued_reqs": (
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance."
    ),
    "max_num_queued_tokens": (
        "The engine has reached its prefill token backlog limit. "
        "Please try again later or on a different instance."
    ),
}


class QueueFullError(RuntimeError):
    """A queue limit refuses the request; answered 503, safe to retry elsewhere."""

    def __init__(self, limit: QueueLimit) -> None:
        super().__init__(_REFUSALS[limit])


class DataParallelRankError(ValueError):
    """X-data-parallel-rank names no engine of this server."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP request asks the engines for: `n` sequences for each prompt."""

    prompts: Sequence[Sequence[int]]
    request_id: str
    n: int
    max_tokens: Sequence[int]
    """Per prompt: already limited to what the model's length leaves."""
    min_tokens: int
    ignore_eos: bool
    stop: Sequence[str]
    include_stop_in_output: bool
    seed: int
    priority: int
    cache_salt: str | None
    session_id: str | None
    data_parallel_rank: int | None
    lora: LoraModule | None
    lora_id: int


class FrontEnd:
    """Serves generations with the engines of one client."""

    def __init__(
        self,
        config: RankConfig,
        client: EngineClient,
        metrics: EngineMetrics,
        admission: AdmissionCounters | None = None,
    ) -> None:
        """`admission`: counters shared with the other API servers of this launch."""
        self.config = config
        self.client = client
        self.metrics = metrics
        scheduler = config.scheduler
        self._limits = QueueLimits(scheduler.max_num_queued_reqs, scheduler.max_num_queued_tokens)
        self._processor = OutputProcessor()
        self._admission = admission
        self._to_abort: set[asyncio.Task[None]] = set()

    @property
    def healthy(self) -> bool:
        """What /health says: that no engine is known to be dead. Nothing more, as in vLLM."""
        return not self.client.engine_dead

    async def run(self) -> None:
        """Deliver outputs and follow the coordinator until cancelled.

        Raises:
            EngineDeadError: an engine died; every request under way has been failed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.client.receive_outputs(self._deliver))
                tasks.create_task(self.client.follow_coordinator(self._on_wave_change))
        except* EngineDeadError:
            self.engine_died()
            raise EngineDeadError from None

    def engine_died(self) -> None:
        """An engine is gone: fail every request under way and refuse new ones."""
        self.client.mark_dead()
        self._processor.fail_all(EngineDeadError())

    @asynccontextmanager
    async def generate(self, generation: Generation) -> AsyncIterator[Collector]:
        """Run one generation; leaving the context aborts what has not finished.

        Raises:
            EngineDeadError: there is no engine.
            QueueFullError: a queue limit was reached.
            DataParallelRankError: the client asked for an engine that is not here.
        """
        if self.client.engine_dead:
            raise EngineDeadError
        self._check_rank(generation.data_parallel_rank)
        collector = Collector(len(generation.prompts) * generation.n)
        request_ids: list[str] = []
        try:
            for index in range(len(generation.prompts)):
                self._check_admission(generation.n)
                for message, sequence in self._requests(generation, index, collector):
                    self._processor.add(sequence)
                    request_ids.append(message.request_id)
                    self._count_admitted()
                    await self.client.add_request(message)
            yield collector
        finally:
            self._abort(request_ids)

    def _requests(
        self, generation: Generation, index: int, collector: Collector
    ) -> Iterator[tuple[wire.EngineCoreRequest, SequenceRequest]]:
        """The `n` engine requests of one prompt, each with what this side keeps of it."""
        prompt, max_tokens = generation.prompts[index], generation.max_tokens[index]
        arrival_s = time.time()
        parent = Parent(generation.n, generation.n)
        lora = generation.lora
        for choice in range(generation.n):
            # The engine needs unique ids; clients choose theirs freely.
            request_id = f"{choice}_{generation.request_id}-{index}-{uuid.uuid4().hex[:8]}"
            yield (
                wire.EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=list(prompt),
                    mm_features=None,
                    sampling_params=wire.SamplingParams(
                        seed=generation.seed + choice,
                        ignore_eos=generation.ignore_eos,
                        max_tokens=max_tokens,
                        min_tokens=generation.min_tokens,
                    ),
                    pooling_params=None,
                    arrival_time=arrival_s,
                    lora_request=(
                        None
                        if lora is None
                        else wire.LoraRequest(lora.name, generation.lora_id, lora.path or lora.name)
                    ),
                    cache_salt=generation.cache_salt,
                    data_parallel_rank=generation.data_parallel_rank,
                    priority=generation.priority,
                    external_req_id=generation.request_id,
                    session_id=generation.session_id,
                ),
                SequenceRequest(
                    request_id=request_id,
                    choice=index * generation.n + choice,
                    collector=collector,
                    prompt_tokens=len(prompt),
                    max_tokens=max_tokens,
                    parent=parent,
                    arrival_s=arrival_s,
                    stop=generation.stop,
                    include_stop_in_output=generation.include_stop_in_output,
                    min_tokens=generation.min_tokens,
                    lora_name=None if lora is None else lora.name,
                ),
            )

    def _check_rank(self, rank: int | None) -> None:
        """The header is a position among this server's engines: 0 only, in external mode."""
        count = len(self.client.engines)
        if rank is not None and not 0 <= rank < count:
            raise DataParallelRankError(f"data_parallel_rank {rank} is out of range [0, {count}).")

    def _check_admission(self, n: int) -> None:
        unfinished = self._processor.unfinished if self._admission is None else self._admission.total()
        limit = self._limits.refusal(unfinished, self._processor.queued_tokens, n)
        if limit is not None:
            self.metrics.record_rejection(limit)
            raise QueueFullError(limit)

    def _count_admitted(self) -> None:
        if self._admission is not None:
            self._admission.set_own(self._processor.unfinished)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests and, if they were still under way, stop the engines' work on them.

        Runs in a task of its own: the caller is often being cancelled because its client has gone.
        """
        unfinished = self._processor.abort(request_ids)
        self._count_admitted()
        if unfinished:
            self._abort_in_engines(unfinished)

    def _abort_in_engines(self, request_ids: list[str]) -> None:
        task = asyncio.create_task(self.client.abort(request_ids))
        self._to_abort.add(task)
        task.add_done_callback(self._to_abort.discard)

    def _deliver(self, outputs: wire.EngineCoreOutputs) -> None:
        iteration, stopped = self._processor.process(outputs, time.time())
        if stopped:
            self._abort_in_engines(stopped)
        self._count_admitted()
        if not self.config.server.log_stats:
            return
        if outputs.scheduler_stats is not None:
            self._processor.add_lora_counts(outputs.scheduler_stats)
            self.metrics.record_scheduler(outputs.engine_index, outputs.scheduler_stats)
        if iteration is not None:
            self.metrics.record_iteration(outputs.engine_index, iteration)

    def _on_wave_change(self) -> None:
        waves = self.client.waves
        if waves is not None and self.config.parallel.lock_step:
            self.metrics.record_wave(waves.current_wave, waves.engines_running)
