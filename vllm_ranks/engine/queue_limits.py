"""When an API server turns a request away instead of queueing it (vLLM 0.32 AsyncLLM.check_admission).

The limits look at what the API server has handed to its engines, not at the engines' own queues. Must
never count anything itself: whoever keeps the requests asks with its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QueueLimit = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
"""The limit that was reached: label `reason` of `vllm:admission_rejections`."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds on the work in front of one API server; `None`: no bound."""

    max_num_queued_reqs: int | None = None
    """Unfinished requests, waiting or running."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens of requests that have no first token yet, whole prompts, cached or not."""

    def refusal(self, unfinished: int, queued_tokens: int, choices: int = 1) -> QueueLimit | None:
        """The limit that forbids one more request of `choices` completions (`n`); answered with 503."""
        if self.max_num_queued_reqs is not None and unfinished + choices > self.max_num_queued_reqs:
            return "max_num_queued_reqs"
        if self.max_num_queued_tokens is not None and queued_tokens >= self.max_num_queued_tokens:
            return "max_num_queued_tokens"
        return None
