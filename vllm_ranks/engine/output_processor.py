"""From engine outputs to text per HTTP request, and to the statistics behind `/metrics`.

One `Collector` per HTTP request gathers the deltas of all its sequences; one `_Sequence` per engine
request turns tokens into text and looks for stop strings (vLLM 0.32 vllm/v1/engine/output_processor.py,
vllm/v1/engine/detokenizer.py). Must never talk to an engine: it says which requests to abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_ranks.engine import wire
from vllm_ranks.engine.metrics import FinishedRequest, IterationStats
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.text import IncrementalDetokenizer


class GenerationError(RuntimeError):
    """The engine failed this one request; answered 500."""


@dataclass(slots=True)
class Delta:
    """What one step added to one choice of a response."""

    choice: int
    text: str
    token_count: int
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The stop string that ended it."""


class Collector:
    """Deltas of one HTTP request, waiting for its handler; bounded by the tokens the request may generate."""

    __slots__ = ("_deltas", "_error", "_ready", "cached_tokens", "created_cache_tokens", "unfinished")

    def __init__(self, sequences: int) -> None:
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self.unfinished = sequences
        """Sequences whose last delta `get` has not returned yet."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache, summed over the sequences that have started."""
        self.created_cache_tokens = 0
        """Prompt tokens written to the prefix cache."""

    def put(self, delta: Delta) -> None:
        """Hand over one delta."""
        self._deltas.append(delta)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._error = error
        self._ready.set()

    async def get(self) -> list[Delta]:
        """All deltas since the last call, at least one; raises what `fail` was given."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        deltas, self._deltas = self._deltas, []
        self.unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas


@dataclass(slots=True)
class Parent:
    """The `n` sequences of one prompt, which the statistics count as one request."""

    n: int
    unfinished: int
    longest: int = 0
    """Most tokens any of them generated."""


@dataclass(slots=True)
class SequenceRequest:
    """What the processor needs to know of one engine request."""

    request_id: str
    choice: int
    collector: Collector
    prompt_tokens: int
    max_tokens: int
    parent: Parent
    arrival_s: float
    """Wall clock."""
    stop: Sequence[str]
    include_stop_in_output: bool
    min_tokens: int
    lora_name: str | None


class _Sequence:
    """Progress of one engine request."""

    __slots__ = (
        *("request", "detokenizer", "text", "hold_back", "generated", "cached_tokens"),
        *("preemptions", "queued_s", "scheduled_s", "first_token_s", "last_token_s"),
    )

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.detokenizer = IncrementalDetokenizer()
        self.text = ""
        """Generated text that is kept back."""
        self.hold_back = max(map(len, request.stop), default=1) - 1
        """Characters kept back, because they may turn out to belong to a stop string."""
        self.generated = 0
        self.cached_tokens = 0
        self.preemptions = 0
        # The engine's monotonic clock; 0 until it happened.
        self.queued_s = 0.0
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0

    def add_tokens(self, tokens: Sequence[int], final: bool) -> tuple[str, str | None]:
        """New text that may be sent, and the stop string that was found."""
        self.generated += len(tokens)
        new_text = self.detokenizer.add(tokens, final)
        request = self.request
        if not request.stop:
            return new_text, None
        self.text += new_text
        if self.generated > request.min_tokens and (found := _find_stop(self.text, request.stop)):
            position, stop = found
            end = position + len(stop) if request.include_stop_in_output else position
            return self.text[:end], stop
        keep = 0 if final else self.hold_back
        cut = max(0, len(self.text) - keep)
        ready, self.text = self.text[:cut], self.text[cut:]
        return ready, None


def _find_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """Position of the earliest stop string, and which one it is."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    return min(found) if found else None


def _between(start_s: float, end_s: float) -> float:
    """A stretch of the engine's clock; 0 if the request was aborted before it began."""
    return end_s - start_s if start_s and end_s else 0.0


class OutputProcessor:
    """All unfinished engine requests of one API server."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}
        self._prefilling_tokens = 0
        self._lora_requests: dict[str, dict[str, bool]] = {}
        """By adapter: the requests for it that its engine has spoken of, and whether they run or wait."""

    @property
    def unfinished(self) -> int:
        """Engine requests under way (`max_num_queued_reqs` counts these)."""
        return len(self._sequences)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests without a first token (`max_num_queued_tokens` counts these)."""
        return self._prefilling_tokens

    def add(self, request: SequenceRequest) -> None:
        """Expect outputs for this request."""
        self._sequences[request.request_id] = _Sequence(request)
        self._prefilling_tokens += request.prompt_tokens

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; returns those that were still under way."""
        found = [request_id for request_id in request_ids if request_id in self._sequences]
        for request_id in found:
            self._forget(self._sequences[request_id])
        return found

    def fail_all(self, error: Exception) -> None:
        """The engine died: every request ends with this error."""
        for sequence in list(self._sequences.values()):
            sequence.request.collector.fail(error)
            self._forget(sequence)

    def process(
        self, outputs: wire.EngineCoreOutputs, now_s: float
    ) -> tuple[IterationStats | None, list[str]]:
        """Deliver one message of outputs.

        Args:
            now_s: wall clock, the one `arrival_s` was taken from.

        Returns:
            What to record, and the requests a stop string ended, which the engine must abort.
        """
        if not outputs.outputs:
            return None, []
        stats = IterationStats()
        to_abort = []
        for output in outputs.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # aborted by its client while the engine generated
            finish_reason = None if output.finish_reason is None else FinishReason(output.finish_reason)
            self._count(sequence, output, outputs.timestamp, now_s, stats)
            text, stop_reason = sequence.add_tokens(output.new_token_ids, finish_reason is not None)
            if stop_reason is not None:
                if finish_reason is None:
                    to_abort.append(output.request_id)
                finish_reason = FinishReason.STOP
            if finish_reason is not None:
                self._finish(sequence, finish_reason, now_s, stats)
            if finish_reason is FinishReason.ERROR:
                sequence.request.collector.fail(GenerationError("Internal server error"))
                continue
            delta = Delta(
                sequence.request.choice, text, len(output.new_token_ids), finish_reason, stop_reason
            )
            sequence.request.collector.put(delta)
        return stats, to_abort

    def add_lora_counts(self, stats: wire.SchedulerStats) -> None:
        """Which adapters wait and run, as this API server learned from its requests' events.

        One with requests is in both, be it with 0 (vLLM 0.32 vllm/v1/metrics/stats.py, LoRARequestStates).
        """
        for name, requests in self._lora_requests.items():
            running = sum(requests.values())
            stats.running_lora_adapters[name] = running
            stats.waiting_lora_adapters[name] = len(requests) - running

    def _count(
        self,
        sequence: _Sequence,
        output: wire.EngineCoreOutput,
        engine_s: float,
        now_s: float,
        stats: IterationStats,
    ) -> None:
        stats.generation_tokens += len(output.new_token_ids)
        for event in output.events or ():
            self._count_event(sequence, event, stats)
        if not output.new_token_ids:
            return
        if sequence.generated == 0:
            self._prefilling_tokens -= sequence.request.prompt_tokens
            if output.prefill_stats is not None:
                prefill = output.prefill_stats
                stats.prompt_tokens += prefill.num_prompt_tokens
                stats.computed_tokens += prefill.num_computed_tokens
                stats.cached_tokens += prefill.num_cached_tokens
                sequence.cached_tokens = prefill.num_cached_tokens
                collector = sequence.request.collector
                collector.cached_tokens += prefill.num_cached_tokens
                collector.created_cache_tokens += prefill.num_cache_creation_tokens
            stats.time_to_first_token_s.append(now_s - sequence.request.arrival_s)
            sequence.first_token_s = engine_s
        else:
            stats.inter_token_latency_s.append(engine_s - sequence.last_token_s)
        sequence.last_token_s = engine_s

    def _count_event(self, sequence: _Sequence, event: wire.EngineEvent, stats: IterationStats) -> None:
        match event.type:
            case wire.EngineEventType.QUEUED:
                sequence.queued_s = event.timestamp
                self._move_lora(sequence, is_running=False)
            case wire.EngineEventType.SCHEDULED:
                if sequence.scheduled_s == 0.0:  # later ones follow a preemption
                    sequence.scheduled_s = event.timestamp
                self._move_lora(sequence, is_running=True)
            case wire.EngineEventType.PREEMPTED:
                stats.preemptions += 1
                sequence.preemptions += 1
                self._move_lora(sequence, is_running=False)

    def _finish(self, sequence: _Sequence, reason: FinishReason, now_s: float, stats: IterationStats) -> None:
        request = sequence.request
        stats.finished.append(
            FinishedRequest(
                reason=reason,
                prompt_tokens=request.prompt_tokens,
                generation_tokens=sequence.generated,
                cached_tokens=sequence.cached_tokens,
                max_tokens=request.max_tokens,
                preemptions=sequence.preemptions,
                e2e_s=now_s - request.arrival_s,
                queued_s=_between(sequence.queued_s, sequence.scheduled_s),
                prefill_s=_between(sequence.scheduled_s, sequence.first_token_s),
                decode_s=_between(sequence.first_token_s, sequence.last_token_s),
                inference_s=_between(sequence.scheduled_s, sequence.last_token_s),
            )
        )
        parent = request.parent
        parent.longest = max(parent.longest, sequence.generated)
        parent.unfinished -= 1
        if parent.unfinished == 0:
            stats.n_params.append(parent.n)
            stats.max_generation_tokens.append(parent.longest)
        self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        if sequence.generated == 0:
            self._prefilling_tokens -= sequence.request.prompt_tokens
        self._move_lora(sequence, is_running=None)

    def _move_lora(self, sequence: _Sequence, *, is_running: bool | None) -> None:
        """Count a request for its adapter, if it has one; `None`: no longer."""
        name = sequence.request.lora_name
        if name is None:
            return
        requests = self._lora_requests.setdefault(name, {})
        if is_running is None:
            requests.pop(sequence.request.request_id, None)
        else:
            requests[sequence.request.request_id] = is_running
        if not requests:
            del self._lora_requests[name]
