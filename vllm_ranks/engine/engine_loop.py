"""The run loop of one engine: inputs → step → outputs → agreement.

    1. drain inputs; block for one when there is nothing to do
    2. work = core.begin_step
    3. executor.execute: the group's slowest rank decides how long the step takes
    4. core.end_step; tokens and statistics go to the front ends
    5. if due, the group agrees whether anybody has unfinished work
    6. wave messages go to the coordinator

vLLM 0.32 vllm/v1/engine/core.py, `run_busy_loop` of EngineCoreProc and DPEngineCoreProc. Must never
decide what runs, what it costs or when a wave ends: `core` does.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from vllm_ranks.engine import wire
from vllm_ranks.engine.core import EngineCore, StepWork
from vllm_ranks.engine.engine_controls import EngineControls, InjectedDeath
from vllm_ranks.engine.engine_requests import EngineSideRequests
from vllm_ranks.engine.executor import Executor
from vllm_ranks.engine.kv_events import EventPublisher
from vllm_ranks.engine.kv_listener import KvEventNotes
from vllm_ranks.engine.outputs import OutputSockets
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.step_outputs import StepOutputs
from vllm_ranks.engine.step_trace import StepTrace
from vllm_ranks.engine.waves import WaveComplete, WaveStarted

logger = logging.getLogger(__name__)


class ShutdownState(enum.Enum):
    """vLLM's EngineShutdownState."""

    RUNNING = enum.auto()
    REQUESTED = enum.auto()
    SHUTTING_DOWN = enum.auto()


class EngineLoop:
    """One engine's loop and everything it touches."""

    def __init__(
        self,
        *,
        core: EngineCore,
        requests: EngineSideRequests,
        sockets: OutputSockets,
        step_outputs: StepOutputs,
        executor: Executor,
        controls: EngineControls,
        publisher: EventPublisher | None,
        kv_notes: KvEventNotes | None,
        internal_balancing: bool,
        shutdown_timeout_s: float,
        step_trace: StepTrace | None,
    ) -> None:
        """`internal_balancing`: front ends balance over engines, and want to know counts and endings."""
        self.sockets = sockets
        self._core = core
        self._requests = requests
        self._outputs = step_outputs
        self._executor = executor
        self._controls = controls
        self._publisher = publisher
        self._kv_notes = kv_notes
        self._internal_balancing = internal_balancing
        self._shutdown_timeout_s = shutdown_timeout_s
        self._trace = step_trace
        self._shutdown_state = ShutdownState.RUNNING
        self._inputs: deque[list[bytes]] = deque()
        self._wake = asyncio.Event()
        self._add = msgspec.msgpack.Decoder(wire.EngineCoreRequest)
        self._abort = msgspec.msgpack.Decoder(list[str])
        self._start_wave = msgspec.msgpack.Decoder(wire.StartWave)
        self._utility = msgspec.msgpack.Decoder(wire.UtilityCall)

    @property
    def shutting_down(self) -> bool:
        """SIGTERM has come."""
        return self._shutdown_state is not ShutdownState.RUNNING

    def put_input(self, frames: list[bytes]) -> None:
        """A message of a front end or the coordinator has arrived."""
        self._inputs.append(frames)
        self._wake.set()

    def request_shutdown(self) -> None:
        """SIGTERM: abort everything, or drain if there is a shutdown timeout; then the loop ends."""
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
            # Before every wait: whom these messages wake may be who is waited for.
            await self._send_wave_messages()
            await self._hang()
            if self._shutdown_state is ShutdownState.REQUESTED:
                await self._begin_shutdown()
            await self._publish_counts()
            work = self._core.begin_step(time.monotonic())
            if work is not None:
                await self._step(work)
            elif self._shutdown_state is ShutdownState.SHUTTING_DOWN:
                return
            else:
                await self._wait_for_input()

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
            for client_index, message in self._outputs.of_step(outcome, now_s).items():
                await self._send(client_index, message)
        await self._publish_kv_events()
        await self._publish_counts()
        if core.agreement_due:
            core.agree(await self._executor.any_rank_unfinished(core.has_unfinished))
        await self._send_wave_messages()

    # --- Inputs -------------------------------------------------------------------------------------

    async def _wait_for_input(self) -> None:
        self._executor.idle()
        if not self._inputs and self._shutdown_state is not ShutdownState.REQUESTED:
            self._wake.clear()
            await self._wake.wait()

    async def _handle_inputs(self) -> None:
        while self._inputs:
            await self._handle_input(self._inputs.popleft())
        if self._controls.dying:
            raise InjectedDeath("engine death was injected")

    async def _hang(self) -> None:
        """An injected hang: messages pile up unread, except the one that ends it."""
        while self._controls.hanging:
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
                    call = self._utility.decode(frames[1])
                    answer = wire.EngineCoreOutputs(utility_output=self._controls.call(call))
                    await self._send(call.client_index, answer)
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            logger.error("Unreadable message to the engine: %s", error)

    async def _add_request(self, message: wire.EngineCoreRequest) -> None:
        if self.shutting_down or self._controls.draining:
            # A draining engine answers what is new with 200 and finish_reason "abort".
            await self._send_finished(message.client_index, [message.request_id], FinishReason.ABORT)
            return
        try:
            request = self._requests.add(message).request
            self._core.add_request(request, time.monotonic(), message.current_wave)
        except ValueError as error:
            logger.error("Request %s cannot be served: %s", message.request_id, error)
            self._requests.discard(message.request_id)
            await self._send_finished(message.client_index, [message.request_id], FinishReason.ERROR)

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

    async def _abort_requests(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """End requests; returns those that were here, by front end."""
        by_client: dict[int, list[str]] = {}
        for sequence in self._core.abort(request_ids):
            request_id = sequence.request.request_id
            by_client.setdefault(self._requests.pop(request_id).client_index, []).append(request_id)
        if self._internal_balancing:
            for client_index, ended in by_client.items():
                await self._send(client_index, wire.EngineCoreOutputs(finished_requests=ended))
        return by_client

    # --- Outputs ------------------------------------------------------------------------------------

    async def _send(self, client_index: int, message: wire.EngineCoreOutputs) -> None:
        if not message.timestamp:
            message.timestamp = time.monotonic()
        await self.sockets.send(client_index, message)

    async def _send_finished(self, client_index: int, request_ids: list[str], reason: FinishReason) -> None:
        outputs = [wire.EngineCoreOutput(request_id, [], finish_reason=reason) for request_id in request_ids]
        await self._send(client_index, wire.EngineCoreOutputs(outputs=outputs, finished_requests=request_ids))

    async def _send_wave_messages(self) -> None:
        for message in self._core.take_messages():
            match message:
                case WaveStarted(wave):
                    await self._send(wire.COORDINATOR, wire.EngineCoreOutputs(start_wave=wave))
                case WaveComplete(wave):
                    await self._send(wire.COORDINATOR, wire.EngineCoreOutputs(wave_complete=wave))

    async def _publish_counts(self) -> None:
        if self._internal_balancing and (message := self._outputs.changed_counts()) is not None:
            await self._send(wire.COORDINATOR, message)

    async def _publish_kv_events(self) -> None:
        if self._publisher is not None and self._kv_notes is not None and (events := self._kv_notes.take()):
            await self._publisher.publish(time.time(), events)

    # --- Shutdown -----------------------------------------------------------------------------------

    async def _begin_shutdown(self) -> None:
        unfinished = self._requests.ids()
        if self._shutdown_timeout_s == 0:
            logger.info("[shutdown] aborting %d in-flight requests", len(unfinished))
            for client_index, request_ids in (await self._abort_requests(unfinished)).items():
                await self._send_finished(client_index, request_ids, FinishReason.ABORT)
        else:
            logger.info("[shutdown] draining %d in-flight requests", len(unfinished))
        self._shutdown_state = ShutdownState.SHUTTING_DOWN
