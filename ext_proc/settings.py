"""What the decision can be told: targets and bounds, as plain values with their defaults.

The gateway fills them from its configuration, the benchmark from its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request should get to count as well served."""

    ttft_s: float = 2.0
    """Time to first token."""
    tpot_s: float = 0.1
    """Time per output token after the first, the mean over a request."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """How reports are believed and prompts remembered."""

    block_tokens: int
    """Tokens of a block of prompts known as text, of which facts tell the hashes."""
    stale_after_s: float = 2.0
    """Age at which a report says nothing about a rank's load any more."""
    down_after_failures: int = 3
    """Failed scrapes in a row after which a rank is down."""
    index_blocks: int = 32_768
    """Blocks remembered per rank until the rank reports the size of its KV cache."""
    max_sessions: int = 65_536
    """Sessions whose last rank is remembered."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """How much more a rank may cost than the policy's choice and still be preferred to it, in seconds."""

    session_bound_s: float = 0.5
    """The rank that served the session last."""
    adapter_bound_s: float = 0.5
    """A rank that runs the LoRA adapter asked for."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """When requests are held back, and how many."""

    phases: bool = True
    """Let lock-step groups prefill in phases when their targets need it."""
    phases_from_requests_per_rank: float = 2.5
    """With fewer decoding, nothing waits for a phase: TTFT goes before the TPOT of so few."""
    backlog_s: float = 0.25
    """Prefill that a rank may have ahead of it and still be given more; beyond, requests wait here, where
    they can be put in a better order and onto a better rank."""
    max_hold_s: float = 10.0
    """No request waits in the gateway longer than this."""
    max_held_requests: int = 1_024
    max_held_tokens: int = 16_000_000
    """Prompt tokens held at once, over all requests."""
    targets: Targets = Targets()
    full_kv_usage: float = 0.95
    """KV use from which a rank with waiting requests gets no more."""
    explains_all: bool = False
    """Tell with every decision what the ranks would have cost, not only where the client asks for it."""

    def never_holding(self) -> AdmissionSettings:
        """The same, but every request is placed when it arrives."""
        return replace(self, phases=False, backlog_s=inf, full_kv_usage=inf)
