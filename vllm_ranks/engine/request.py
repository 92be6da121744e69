"""One request as the scheduler sees it: how many tokens, which blocks, how it ends.

Token ids, text and sampling stay at the edge: the engine only models time and memory, so it is told in
advance how many tokens a request will produce. Must never hold scheduling state; `sequence` does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a request ended; the numbers are vLLM's (vLLM 0.32 vllm/v1/engine/__init__.py)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


@dataclass(slots=True)
class EngineRequest:
    """What one request asks of one rank."""

    request_id: str
    arrival_s: float
    """When the request reached the API server: ties of priority are broken by it, TTFT counts from it."""
    prompt_tokens: int
    output_tokens: int
    """Tokens it generates before it ends by itself, at least 1; the model's length may cut it shorter."""
    finish_reason: FinishReason = FinishReason.LENGTH
    """How it ends once `output_tokens` is reached: STOP or LENGTH."""
    priority: int = 0
    """Lower is served first; only the `priority` policy looks at it."""
    prompt_block_hashes: Sequence[Hashable] = ()
    """One chained hash per full prompt block, computed at the edge; empty: nothing of it is cached."""
    lora_name: str | None = None
