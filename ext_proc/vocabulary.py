"""The words of wavegate as plain data: rank, report, request facts, pick.

Every package may import this module; it imports none of them and never does I/O.
The meaning of each word is fixed in the README's vocabulary table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ext_proc.prompt_tokens import PromptTokens


@dataclass(frozen=True, slots=True)
class Rank:
    """One endpoint: one vLLM API server with its local engine."""

    group: str
    """Name of the group: the ranks that form one data-parallel deployment, one failure domain."""
    index: int
    """Data-parallel rank within the group, from 0."""
    endpoint: str
    """`ip:port`, spelled exactly as in Envoy's cluster (IPv6 in brackets)."""

    @property
    def name(self) -> str:
        """`<group>/<index>`, as clients see it in `x-wavegate-rank`."""
        return f"{self.group}/{self.index}"

    @property
    def address(self) -> str:
        """The IP address alone, without brackets."""
        return self.endpoint.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class Subset:
    """The ranks among which a gateway lets us choose: the endpoint-picker protocol's subset hint."""

    endpoints: frozenset[str]
    """`ip:port`."""
    addresses: frozenset[str]
    """IP addresses, without brackets, that stand for all their ports."""

    def __contains__(self, rank: Rank) -> bool:
        return rank.endpoint in self.endpoints or rank.address in self.addresses


@dataclass(frozen=True, slots=True)
class RankCounters:
    """What a rank has counted since it started."""

    first_tokens: int
    """Requests that have had their first token (`vllm:time_to_first_token_seconds_count`)."""
    inter_token_sum_s: float
    """Seconds between consecutive tokens, summed (`vllm:inter_token_latency_seconds_sum`)."""
    inter_token_count: int
    computed_prompt_tokens: int
    """Prompt tokens computed, not taken from a cache, of requests that have had their first token
    (`vllm:prompt_tokens_by_source_total{source="local_compute"}`)."""

    def is_restart_of(self, before: RankCounters) -> bool:
        """Whether the rank has started anew since it reported `before`."""
        return self.first_tokens < before.first_tokens or self.inter_token_count < before.inter_token_count


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank said about itself at one moment."""

    taken_at_s: float
    """Monotonic clock of the gateway when the answer had arrived."""
    running: int
    """Requests in the rank's running batch (`vllm:num_requests_running`)."""
    waiting: int
    """Requests queued inside the rank (`vllm:num_requests_waiting`)."""
    kv_cache_usage: float
    """Share of KV blocks in use, 0 to 1 (`vllm:kv_cache_usage_perc`)."""
    wave: int | None = None
    """Wave number; only the embedded engine exposes it."""
    counters: RankCounters | None = None
    """`None` if the page lacks them."""
    kv_capacity_tokens: int | None = None
    """Size of the KV cache (`vllm:cache_config_info`)."""
    kv_block_tokens: int | None = None
    """Size of its blocks, likewise."""
    engine_steps: int | None = None
    """Steps with work that the engine has done since it started (`vllm:iteration_tokens_total_count`)."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that its requests use now, running or waiting (`vllm:lora_requests_info`)."""


class CallKind(StrEnum):
    """Which API a request calls; `OTHER` is balanced by load alone."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RESPONSE = "response"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the decision needs to know about one request; unreadable parts stay `None`, never guessed."""

    kind: CallKind
    request_id: str
    model: str | None = None
    stream: bool = False
    prompt_chars: int = 0
    """Length of all prompt text, in Unicode characters; 0 when it could not be read."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens: exact where the prompt is known as tokens, else estimated from its
    characters."""
    max_tokens: int | None = None
    """Generation bound the client asked for; `None` when it gave none."""
    n: int = 1
    """Completions asked for per prompt."""
    subset: Subset | None = None
    """The ranks it may go to; `None`: any of the pool."""
    prompt_blocks: tuple[int, ...] = ()
    """Chained hashes of the full blocks of the prompt's text; empty when it is not looked at that closely."""
    tokens: PromptTokens | None = None
    """The prompt as the tokens that the engine will see; `None` where that is not known."""
    priority: int = 0
    """Lower is more urgent, as in vLLM."""
    tenant: str = ""
    """Whose request it is, for fairness between tenants."""
    session: int | None = None
    """The conversation it belongs to, as a hash of its name; `None`: none that is known."""
    wants_explanation: bool = False
    """Whether the client wants to see why the request goes where it goes."""


class RankState(StrEnum):
    """What the ledger believes about a rank's reports."""

    UNKNOWN = "unknown"
    """Never yet reported: neither idle nor full."""
    FRESH = "fresh"
    STALE = "stale"
    """Last report too old: neither idle nor full."""
    DOWN = "down"
    """Unreachable for several scrapes in a row."""


class PickReason(StrEnum):
    """Why a pick was made the way it was; the label of `wavegate_picks_total`."""

    POLICY = "policy"
    """The policy's choice among all ranks it may use."""
    SESSION = "session"
    """The rank that served the session last; it costs no more than a bound above the policy's choice."""
    ADAPTER = "adapter"
    """A rank that runs the LoRA adapter asked for, within a bound likewise."""
    NO_HEALTHY_GROUP = "no_healthy_group"
    """Every group had a rank that is down: the pick ignored health rather than refuse."""
    POLICY_FAILED = "policy_failed"
    """The policy raised an error: the rank with the fewest requests was taken."""


@dataclass(frozen=True, slots=True)
class RankCost:
    """What a request would cost on one rank."""

    rank: Rank
    parts: Mapping[str, float]
    """What the cost is the sum of, in the policy's unit."""
    cached_tokens: int
    """Prompt tokens that the rank probably has in its cache."""

    @property
    def cost(self) -> float:
        """Lower is better."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Pick:
    """The decision for one request."""

    ranks: tuple[Rank, ...]
    """In order of preference, distinct, never empty; Envoy retries down the list."""
    reason: PickReason
    costs: tuple[RankCost, ...] = ()
    """Of the rank picked, then of the cheapest others; empty unless asked for."""

    @property
    def first(self) -> Rank:
        """The rank that holds the reservation."""
        return self.ranks[0]
