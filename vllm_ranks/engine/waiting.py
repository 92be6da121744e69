"""The waiting queue of one rank, in the order its policy serves it.

The policies are those of vLLM 0.32 vllm/v1/core/sched/request_queue.py.
Must never look at anything but the order: whether the first in line fits is the scheduler's business.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Literal, Protocol

from vllm_ranks.engine.sequence import SequenceState

SchedulingPolicy = Literal["fcfs", "priority"]


class WaitingQueue(Protocol):
    """What the scheduler asks of a queue."""

    def push(self, sequence: SequenceState) -> None:
        """A new request."""

    def put_back(self, sequence: SequenceState) -> None:
        """A request that had left the queue already: preempted, or passed over."""

    def peek(self) -> SequenceState:
        """The next in line; the queue must not be empty."""

    def pop(self) -> SequenceState:
        """Take the next in line; the queue must not be empty."""

    def remove(self, sequence: SequenceState) -> None:
        """Take one from anywhere in the queue."""

    def __len__(self) -> int: ...


class FcfsQueue:
    """First come, first served; what is put back goes to the front."""

    def __init__(self) -> None:
        self._queue: deque[SequenceState] = deque()

    def push(self, sequence: SequenceState) -> None:
        """A new request, last in line."""
        self._queue.append(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """A request that had left the queue already, first in line."""
        self._queue.appendleft(sequence)

    def peek(self) -> SequenceState:
        """The first in line."""
        return self._queue[0]

    def pop(self) -> SequenceState:
        """Take the first in line."""
        return self._queue.popleft()

    def remove(self, sequence: SequenceState) -> None:
        """Take one from anywhere in line."""
        self._queue.remove(sequence)

    def __len__(self) -> int:
        return len(self._queue)


class PriorityQueue:
    """Lowest priority value first, then earliest arrival; what is put back has its place by both."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, SequenceState]] = []

    def push(self, sequence: SequenceState) -> None:
        """A request, wherever its priority and arrival put it."""
        request = sequence.request
        heapq.heappush(self._heap, (request.priority, request.arrival_s, request.request_id, sequence))

    put_back = push

    def peek(self) -> SequenceState:
        """The most urgent one."""
        return self._heap[0][-1]

    def pop(self) -> SequenceState:
        """Take the most urgent one."""
        return heapq.heappop(self._heap)[-1]

    def remove(self, sequence: SequenceState) -> None:
        """Take one from anywhere in the queue."""
        self._heap = [entry for entry in self._heap if entry[-1] is not sequence]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """An empty queue of that policy."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
