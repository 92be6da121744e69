"""How many tokens requests generate, learned from those that ended. Pure.

Kept by model and by prompt length in powers of two, since both tell something; an unknown pair is answered
from what is known of the model, else of everything. Of the quantiles only the median is made: policies ask
what a request will typically generate, and nobody asks for another.

Lengths are steps of the group between first token and end, not tokens that ranks count. Where responses do
not pass through the gateway, a client that hung up counts as an end, and what it got as all there was.
"""

from __future__ import annotations

from collections import deque

from ext_proc.vocabulary import RequestFacts

REMEMBERED = 128
"""Ends remembered per model and prompt length."""
MAX_MODELS = 64
"""Models told apart; the others share one memory."""
UNKNOWN_TOKENS = 256
"""Expected while nothing has ended anywhere."""
_EVERYTHING = ("", -1)


class _Memory:
    """The last lengths seen, and their median."""

    __slots__ = ("_lengths", "_median", "_since_sorted")

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._median = 0
        self._since_sorted = 0

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)
        self._since_sorted += 1
        if self._since_sorted >= 16 or len(self._lengths) <= 16:
            self._median = sorted(self._lengths)[len(self._lengths) // 2]
            self._since_sorted = 0

    @property
    def median(self) -> int:
        return self._median


class OutputLengths:
    """What the requests of one gateway generate."""

    def __init__(self) -> None:
        self._memories: dict[tuple[str, int], _Memory] = {}
        self._models: set[str] = set()

    def record(self, facts: RequestFacts, generated_tokens: int) -> None:
        """A request has ended after about so many tokens."""
        model = self._model(facts, learn=True)
        for key in ((model, facts.prompt_tokens.bit_length()), (model, -1), _EVERYTHING):
            self._memories.setdefault(key, _Memory()).add(generated_tokens)

    def expected(self, facts: RequestFacts) -> int:
        """Tokens that half of such requests do not exceed, within what the client allows."""
        model = self._model(facts, learn=False)
        for key in ((model, facts.prompt_tokens.bit_length()), (model, -1), _EVERYTHING):
            memory = self._memories.get(key)
            if memory is not None:
                expected = memory.median
                break
        else:
            expected = UNKNOWN_TOKENS
        return expected if facts.max_tokens is None else min(expected, facts.max_tokens)

    def _model(self, facts: RequestFacts, *, learn: bool) -> str:
        model = facts.model or ""
        if model in self._models:
            return model
        if learn and len(self._models) < MAX_MODELS:
            self._models.add(model)
            return model
        return ""
