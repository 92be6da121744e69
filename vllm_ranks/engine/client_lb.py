"""The balancing client of internal and hybrid mode: which engine gets a request.

`current` is vLLM 0.32's score (vllm/v1/engine/core_client.py, class DPLBAsyncMPClient):

    score = max(clients × own in-flight, waiting + running) + waiting × 6 × max(0, KV usage − 0.5)

`original` is that of vLLM PR #19790: waiting × 4 + running. Both take the lowest, scanning from an index
that rotates, and count the request as waiting until the coordinator's next word. Must never send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from vllm_ranks.engine import wire
from vllm_ranks.engine.arguments import LoadBalancingScore
from vllm_ranks.engine.client import DpEngineClient
from vllm_ranks.engine.sockets import Context, Socket
from vllm_ranks.engine.waves import EngineCounts, WavePublication

_KV_PRESSURE_WEIGHT = 6.0
_KV_PRESSURE_FROM = 0.5
_ORIGINAL_WAITING_WEIGHT = 4


class EngineBalancer:
    """The pure part: counts in, choice out."""

    def __init__(
        self, engines: int, score: LoadBalancingScore, client_index: int = 0, client_count: int = 1
    ) -> None:
        self._score = score
        self._client_count = client_count
        self._counts = [EngineCounts()] * engines
        self._start = engines * client_index // client_count
        self.in_flight: Counter[int] = Counter()
        """This client's own unfinished requests by position: exact, never overwritten by a publication."""

    def set_counts(self, counts: Sequence[EngineCounts]) -> None:
        """The coordinator's latest word on these engines."""
        self._counts = list(counts)

    def choose(self) -> int:
        """Position of the engine for the next request, which is counted at once."""
        positions = [(self._start + offset) % len(self._counts) for offset in range(len(self._counts))]
        chosen = min(positions, key=self._score_of)  # the first among equals
        counts = self._counts[chosen]
        waiting = counts.waiting + self._client_count
        self._counts[chosen] = EngineCounts(waiting, counts.running, counts.kv_usage)
        self._start = (self._start + 1) % len(self._counts)
        return chosen

    def _score_of(self, position: int) -> float:
        counts = self._counts[position]
        if self._score == "original":
            return counts.waiting * _ORIGINAL_WAITING_WEIGHT + counts.running
        score: float = max(self._client_count * self.in_flight[position], counts.waiting + counts.running)
        if counts.waiting:
            pressure = max(0.0, counts.kv_usage - _KV_PRESSURE_FROM)
            score += counts.waiting * _KV_PRESSURE_WEIGHT * pressure
        return score


class DpLoadBalancingClient(DpEngineClient):
    """Sends each request to the engine the balancer chooses, and its abort to the same one."""

    def __init__(
        self,
        context: Context,
        input_socket: Socket,
        output_socket: Socket,
        managed_ranks: Iterable[int],
        client_index: int,
        client_count: int,
        score: LoadBalancingScore,
    ) -> None:
        super().__init__(context, input_socket, output_socket, managed_ranks, client_index)
        self._balancer = EngineBalancer(len(self.engines), score, client_index, client_count)
        self._engine_of: dict[str, int] = {}

    def engine_for(self, request: wire.EngineCoreRequest) -> int:
        """An explicit data_parallel_rank (position among the managed engines), else the balancer's choice."""
        position = request.data_parallel_rank
        if position is None:
            position = self._balancer.choose()
        rank = self.engines[position]
        self._engine_of[request.request_id] = rank
        self._balancer.in_flight[position] += 1
        return rank

    def on_outputs(self, outputs: wire.EngineCoreOutputs) -> None:
        for request_id in outputs.finished_requests or ():
            rank = self._engine_of.pop(request_id, None)
            if rank is not None:
                self._balancer.in_flight[self.engines.index(rank)] -= 1

    def on_publication(self, publication: WavePublication) -> None:
        if publication.counts is not None:
            # Counts are global; this client sees the engines it manages.
            self._balancer.set_counts([publication.counts[rank] for rank in self.engines])

    def _by_engine(self, request_ids: Iterable[str]) -> Mapping[int, list[str]]:
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            rank = self._engine_of.get(request_id)
            if rank is not None:
                by_engine.setdefault(rank, []).append(request_id)
        return by_engine
