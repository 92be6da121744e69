"""The run loop of one engine: inputs → step → outputs → agreement (specification §5.2).

    1. drain inputs; block for one when there is nothing to do
    2. work = core.begin_step
    3. executor.execute: the group's slowest rank decides how long the step takes
    4. core.end_step; tokens and statistics go to the front ends
    5. if due, the group agrees whether anybody has unfinished work
    6. wave messages go to the coordinator

Must never decide what runs, what it costs or when a wave ends: `core` does.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec

from vllm_ranks.engine import wire
from vllm_ranks.engine.collective import Collective
from vllm_ranks.engine.core import EngineCore, StepWork
from vllm_ranks.engine.engine_requests import EngineSideRequests
from vllm_ranks.engine.executor import Executor
from vllm_ranks.engine.kv_events import EventPublisher
from vllm_ranks.engine.kv_listener import KvEventNotes
from vllm_ranks.engine.outputs import OutputSockets
from vllm_ranks.engine.plan import StepOutcome
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.sequence import SequenceState
from vllm_ranks.engine.step_trace import StepTrace
from vllm_ranks.engine.waves import EngineStats, WaveComplete, WaveStarted

logger = logging.getLogger(__name__)


class ShutdownState(enum.Enum):
    """vLLM's EngineShutdownState."""

    RUNNING = enum.auto()
    REQUESTED = enum.auto()
    SHUTTING_DOWN = enum.auto()


class InjectedDeath(RuntimeError):
    """The engine was told to die, to see what everybody else makes of it."""


class EngineLoop:
    """One engine's loop and everything it touches."""

    def __init__(
        self,
        *,
        core: EngineCore,
        requests: EngineSideRequests,
        outputs: OutputSockets,
        executor: Executor,
        group: Collective | None,
        publisher: EventPublisher | None,
        kv_notes: KvEventNotes | None,
        publishes_queue_stats: bool,
        shutdown_timeout_s: float,
        log_stats: bool,
        enable_fault_injection: bool,
        step_trace: StepTrace | None,
    ) -> None:
        self.outputs = outputs
        self._core = core
        self._requests = requests
        self._executor = executor
        self._group = group
        self._publisher = publisher
        self._kv_notes = kv_notes
        self._publishes_queue_stats = publishes_queue_stats
        self._shutdown_timeout_s = shutdown_timeout_s
        self._log_stats = log_stats
        self._trace = step_trace
        self._shutdown_state = ShutdownState.RUNNING
        self._exits_after_drain = True
        self._inputs: deque[list[bytes]] = deque()
        self._wake = asyncio.Event()
        self._hanging = False
        self._death: InjectedDeath | None = None
        self._last_counts: EngineStats | None = None
        self._reported_queries = 0
        self._reported_hits = 0
        self._add = msgspec.msgpack.Decoder(wire.EngineCoreRequest)
        self._abort = msgspec.msgpack.Decoder(list[str])
        self._start_wave = msgspec.msgpack.Decoder(wire.StartWave)
        self._utility = msgspec.msgpack.Decoder(wire.UtilityCall)
        self._utilities: dict[str, Callable[..., Any]] = {
            "is_sleeping": lambda: False,
            "reset_prefix_cache": self._reset_prefix_cache,
        }
        if enable_fault_injection:
            self._utilities |= {
                "set_slowdown": self._set_slowdown,
                "set_hanging": self._set_hanging,
                "set_on_peer_death": self._set_on_peer_death,
                "drain": self._drain,
                "die": self._die,
            }

    @property
    def shutting_down(self) -> bool:
        """SIGTERM has come."""
        return self._shutdown_state is not ShutdownState.RUNNING and self._exits_after_drain

    def put_input(self, frames: list[bytes]) -> None:
        """A message of a front end or the coordinator has arrived."""
        self._inputs.append(frames)
        self._wake.set()

    def request_shutdown(self) -> None:
        """SIGTERM: abort everything, or drain if there is a shutdown timeout; then the loop ends."""
        self._exits_after_drain = True
        if self._shutdown_state is ShutdownState.RUNNING:
            self._shutdown_state = ShutdownState.REQUESTED
        self._wake.set()

    async def run(self) -> None:
        """Loop until a shutdown has nothing left to wait for.

        Raises:
            CollectiveError: the group is broken.
            InjectedDeath: an injected fault.
        """
        while True:
            await self._handle_inputs()
            await self._send_wave_messages()
            await self._hang()
            if self._shutdown_state is ShutdownState.REQUESTED:
                await self._begin_shutdown()
            await self._publish_queue_stats()
            work = self._core.begin_step(time.monotonic())
            if work is None:
                if self._shutdown_state is ShutdownState.SHUTTING_DOWN and self._exits_after_drain:
                    return
                await self._wait_for_input()
                continue
            await self._step(work)

    async def _step(self, work: StepWork) -> None:
        core = self._core
        if work.in_lock_step:
            cost_s = await self._executor.execute(work.cost_s)
            if self._trace is not None:
                self._trace.write(core, work, cost_s)
        await self._abort_early()
        now_s = time.monotonic()
        outcome = core.end_step(work, now_s)
        if outcome is not None:
            await self._send_outputs(outcome, now_s)
        await self._publish_kv_events()
        await self._publish_queue_stats()
        if core.agreement_due:
            core.agree(await self._executor.any_rank_unfinished(core.has_unfinished))
        await self._send_wave_messages()

    async def _send_wave_messages(self) -> None:
        """To be called before every wait: whom they wake may be who is waited for."""
        for message in self._core.take_messages():
            match message:
                case WaveStarted(wave):
                    await self._tell_coordinator(wire.EngineCoreOutputs(start_wave=wave))
                case WaveComplete(wave):
                    await self._tell_coordinator(wire.EngineCoreOutputs(wave_complete=wave))

    # --- Inputs -------------------------------------------------------------------------------------

    async def _wait_for_input(self) -> None:
        self._executor.idle()
        if not self._inputs and self._shutdown_state is not ShutdownState.REQUESTED:
            self._wake.clear()
            await self._wake.wait()

    async def _handle_inputs(self) -> None:
        while self._inputs:
            await self._handle_input(self._inputs.popleft())
        if self._death is not None:
            raise self._death

    async def _hang(self) -> None:
        """An injected hang: messages pile up unread, except the one that ends it."""
        while self._hanging:
            utilities = [f for f in self._inputs if f[0] == wire.EngineRequestType.UTILITY]
            for frames in utilities:
                self._inputs.remove(frames)
                await self._handle_input(frames)
            if not utilities:
                self._wake.clear()
                await self._wake.wait()

    async def _handle_input(self, frames: list[bytes]) -> None:
        if frames == [wire.COORDINATOR_READY]:
            return  # sent again to engines that subscribe later
        try:
            match wire.EngineRequestType(frames[0]):
                case wire.EngineRequestType.ADD:
                    await self._add_request(self._add.decode(frames[1]))
                case wire.EngineRequestType.ABORT:
                    await self._abort_requests(self._abort.decode(frames[1]))
                case wire.EngineRequestType.START_DP_WAVE:
                    start = self._start_wave.decode(frames[1])
                    self._core.start_dp_wave(start.wave, start.exclude_engine)
                case wire.EngineRequestType.UTILITY:
                    await self._call_utility(self._utility.decode(frames[1]))
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            logger.error("Unreadable message to the engine: %s", error)

    async def _add_request(self, message: wire.EngineCoreRequest) -> None:
        if self._shutdown_state is not ShutdownState.RUNNING:
            # A draining engine answers what is new with 200 and finish_reason "abort".
            await self._finish_at_once(message, FinishReason.ABORT)
            return
        try:
            request = self._requests.add(message).request
            self._core.add_request(request, time.monotonic(), message.current_wave)
        except ValueError as error:
            logger.error("Request %s cannot be served: %s", message.request_id, error)
            self._requests.discard(message.request_id)
            await self._finish_at_once(message, FinishReason.ERROR)

    async def _finish_at_once(self, message: wire.EngineCoreRequest, reason: FinishReason) -> None:
        await self._send_finished(message.client_index, [message.request_id], reason)

    async def _abort_early(self) -> None:
        """Aborts that came during the step take effect before its outputs, as in vLLM."""
        kept: deque[list[bytes]] = deque()
        while self._inputs:
            frames = self._inputs.popleft()
            if frames[0] == wire.EngineRequestType.ABORT:
                await self._handle_input(frames)
                if any(f[0] == wire.EngineRequestType.ADD for f in kept):
                    kept.append(frames)  # it may be for one of those
            else:
                kept.append(frames)
        self._inputs = kept

    async def _abort_requests(self, request_ids: Iterable[str]) -> None:
        by_client: dict[int, list[str]] = {}
        for sequence in self._core.abort(request_ids):
            request_id = sequence.request.request_id
            by_client.setdefault(self._requests.pop(request_id).client_index, []).append(request_id)
        if self._publishes_queue_stats:
            for client_index, finished in by_client.items():
                await self._send(client_index, wire.EngineCoreOutputs(finished_requests=finished))

    # --- Outputs ------------------------------------------------------------------------------------

    async def _send(self, client_index: int, message: wire.EngineCoreOutputs) -> None:
        if not message.timestamp:
            message.timestamp = time.monotonic()
        await self.outputs.send(client_index, message)

    async def _tell_coordinator(self, message: wire.EngineCoreOutputs) -> None:
        await self._send(wire.COORDINATOR, message)

    async def _send_finished(self, client_index: int, request_ids: list[str], reason: FinishReason) -> None:
        outputs = [wire.EngineCoreOutput(request_id, [], finish_reason=reason) for request_id in request_ids]
        await self._send(client_index, wire.EngineCoreOutputs(outputs=outputs, finished_requests=request_ids))

    async def _send_outputs(self, outcome: StepOutcome, now_s: float) -> None:
        finished = set(outcome.finished)
        by_client: dict[int, wire.EngineCoreOutputs] = {}
        for sequences, ends_prefill in ((outcome.prefilled, True), (outcome.decoded, False)):
            for sequence in sequences:
                request_id = sequence.request.request_id
                kept = self._requests[request_id]
                output = wire.EngineCoreOutput(request_id, [kept.next_token()])
                if ends_prefill:
                    _tell_of_prefill(output, sequence, now_s)
                message = by_client.get(kept.client_index)
                if message is None:
                    message = by_client[kept.client_index] = wire.EngineCoreOutputs(
                        outputs=[], timestamp=now_s
                    )
                message.outputs.append(output)
                if sequence in finished:
                    output.finish_reason = sequence.finish_reason
                    self._requests.pop(request_id)
                    if self._publishes_queue_stats:
                        message.finished_requests = [*(message.finished_requests or ()), request_id]
        if self._log_stats:
            if not by_client:
                by_client[0] = wire.EngineCoreOutputs(timestamp=now_s)
            # One front end is enough: they share their metrics.
            next(iter(by_client.values())).scheduler_stats = self._scheduler_stats()
        for client_index, message in by_client.items():
            await self._send(client_index, message)

    def _scheduler_stats(self) -> wire.SchedulerStats:
        stats = self._core.stats()
        lookups = wire.PrefixCacheStats(
            queries=stats.prefix_cache_queries - self._reported_queries,
            hits=stats.prefix_cache_hits - self._reported_hits,
        )
        self._reported_queries = stats.prefix_cache_queries
        self._reported_hits = stats.prefix_cache_hits
        return wire.SchedulerStats(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            step_counter=stats.step_counter,
            current_wave=stats.current_wave,
            kv_cache_usage=stats.kv_usage,
            prefix_cache_stats=lookups,
        )

    async def _publish_queue_stats(self) -> None:
        """Internal and hybrid mode: tell the coordinator when the queues have changed."""
        if not self._publishes_queue_stats:
            return
        stats = self._core.coordinator_stats()
        if self._last_counts is not None and stats.counts == self._last_counts.counts:
            return
        self._last_counts = stats
        await self._tell_coordinator(
            wire.EngineCoreOutputs(
                scheduler_stats=wire.SchedulerStats(
                    num_running_reqs=stats.counts.running,
                    num_waiting_reqs=stats.counts.waiting,
                    step_counter=stats.step,
                    current_wave=stats.wave,
                    kv_cache_usage=stats.counts.kv_usage,
                )
            )
        )

    async def _publish_kv_events(self) -> None:
        if self._publisher is not None and self._kv_notes is not None and (events := self._kv_notes.take()):
            await self._publisher.publish(time.time(), events)

    # --- Shutdown -----------------------------------------------------------------------------------

    async def _begin_shutdown(self) -> None:
        unfinished = self._requests.ids()
        if self._shutdown_timeout_s == 0 and self._exits_after_drain:
            logger.info("[shutdown] aborting %d in-flight requests", len(unfinished))
            by_client: dict[int, list[str]] = {}
            for request_id in unfinished:
                by_client.setdefault(self._requests[request_id].client_index, []).append(request_id)
            await self._abort_requests(unfinished)
            for client_index, request_ids in by_client.items():
                await self._send_finished(client_index, request_ids, FinishReason.ABORT)
        else:
            logger.info("[shutdown] draining %d in-flight requests", len(unfinished))
        self._shutdown_state = ShutdownState.SHUTTING_DOWN

    # --- Utilities ----------------------------------------------------------------------------------

    async def _call_utility(self, call: wire.UtilityCall) -> None:
        method = self._utilities.get(call.method)
        if method is None:
            failure = f"Call to {call.method} method failed: no such method in the embedded engine"
            output = wire.UtilityOutput(call.call_id, failure_message=failure)
        else:
            try:
                output = wire.UtilityOutput(call.call_id, result=[None, method(*call.args)])
            except (TypeError, ValueError) as error:
                failure = f"Call to {call.method} method failed: {error}"
                output = wire.UtilityOutput(call.call_id, failure_message=failure)
        await self._send(call.client_index, wire.EngineCoreOutputs(utility_output=output))

    def _reset_prefix_cache(self, *_: Any) -> bool:
        return self._core.scheduler.kv_cache.reset()

    def _set_slowdown(self, factor: float) -> None:
        self._core.time_model = replace(self._core.time_model, slowdown=factor)

    def _set_hanging(self, hanging: bool) -> None:
        self._hanging = hanging

    def _set_on_peer_death(self, policy: str) -> None:
        if policy not in ("exit", "hang"):
            raise ValueError(f"policy must be exit or hang, got {policy!r}")
        if self._group is not None:
            self._group.on_peer_death = "exit" if policy == "exit" else "hang"

    def _drain(self, draining: bool) -> None:
        """As after SIGTERM with a shutdown timeout, but without an end."""
        if draining:
            self._exits_after_drain = False
            self._shutdown_state = ShutdownState.REQUESTED
        else:
            self._shutdown_state = ShutdownState.RUNNING

    def _die(self) -> None:
        self._death = InjectedDeath("engine death was injected")


def _tell_of_prefill(output: wire.EngineCoreOutput, sequence: SequenceState, now_s: float) -> None:
    """The first output of a request, and the first after a preemption, carry what happened before."""
    events = []
    if sequence.generated_tokens == 1:
        scheduled_s = sequence.scheduled_s if sequence.scheduled_s is not None else now_s
        events.append(wire.EngineEvent(wire.EngineEventType.QUEUED, sequence.queued_s))
        events.append(wire.EngineEvent(wire.EngineEventType.SCHEDULED, scheduled_s))
        prompt, cached = sequence.request.prompt_tokens, sequence.cached_tokens
        output.prefill_stats = wire.PrefillStats(
            num_prompt_tokens=prompt,
            num_computed_tokens=prompt - cached,
            num_cached_tokens=cached,
            num_local_cached_tokens=cached,
        )
    for _ in range(sequence.unreported_preemptions):
        events.append(wire.EngineEvent(wire.EngineEventType.PREEMPTED, now_s))
        events.append(wire.EngineEvent(wire.EngineEventType.SCHEDULED, now_s))
    sequence.unreported_preemptions = 0
    output.events = events or None
