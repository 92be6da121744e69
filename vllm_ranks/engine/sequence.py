"""One request while a rank holds it: how far it is, and which KV blocks it uses.

Must never decide anything: the scheduler moves it, these are its notes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain

from vllm_ranks.engine.kv_cache import Block
from vllm_ranks.engine.request import EngineRequest, FinishReason


class Stage(Enum):
    """Where a request is on its way through the rank."""

    WAITING = auto()
    PREFILLING = auto()
    """Running, with tokens to compute before it can produce the next one."""
    DECODING = auto()
    """Running, one token per step."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request's state within the scheduler; equal to nothing but itself."""

    request: EngineRequest
    output_tokens: int
    """After how many generated tokens it ends; never beyond the model's length."""
    finish_reason: FinishReason
    stage: Stage = Stage.WAITING
    admission: int = -1
    """Number of its latest admission: running requests are served in this order."""

    generated_tokens: int = 0
    """Tokens generated; while DECODING only as of when it began to (see `decode_epoch`)."""
    computed_tokens: int = 0
    """Tokens whose KV is computed; while DECODING only as of when it began to."""
    decode_epoch: int = 0
    """The decode clock's tick at which it would have generated nothing: ticks since are its tokens."""
    boundary_tick: int = -1
    """Tick at which it next fills or needs a block."""
    finish_tick: int = -1
    """Tick with which its last token appears."""

    findable: bool = True
    """Its blocks take part in prefix caching."""
    blocks: list[Block] = field(default_factory=list)
    """Its full blocks with known content, from the start of the prompt."""
    block_count: int = 0
    """All its blocks, those without reusable content included."""
    generated_hashes: list[Hashable] = field(default_factory=list)
    """Hashes of full blocks beyond the prompt's, so far as they were ever needed."""

    cached_tokens: int = 0
    """Prompt tokens the prefix cache held at the first admission."""
    preemptions: int = 0
    unreported_preemptions: int = 0
    """Preemptions since its last token: vLLM counts them when the next token tells of them."""

    queued_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    interrupted_s: float | None = None
    """Preempted while it decoded: when it got its last token before that."""

    @property
    def known_tokens(self) -> int:
        """Tokens that must be computed before the next can be generated; not while DECODING."""
        return self.request.prompt_tokens + self.generated_tokens

    def known_hashes(self) -> chain[Hashable]:
        """Block hashes from the start of the prompt, as far as known."""
        return chain(self.request.prompt_block_hashes, self.generated_hashes)
