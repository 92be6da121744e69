"""All decoding sequences of a rank advance by one token per step, so one clock advances them all.

A sequence that begins to decode notes the tick; from then on its tokens are a subtraction. What happens
to it later (it fills a KV block, needs another, ends) happens at a tick that is known in advance and is
looked up when that tick comes. A step over any number of decoding sequences so costs what happens in
it, not what is running. Must never touch the KV cache: it says who is due, the scheduler acts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from vllm_ranks.engine.sequence import SequenceState, Stage

_admission = attrgetter("admission")


class DecodeClock:
    """The decoding sequences of one rank and their common time."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tick = 0
        """Steps completed."""
        self.sequences: list[SequenceState] = []
        """In order of admission."""
        self._boundaries: dict[int, list[SequenceState]] = {}
        self._finishes: dict[int, list[SequenceState]] = {}
        self._computed_at_tick_0 = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def start(self, sequence: SequenceState) -> None:
        """It has computed all tokens but the one it generated last, and decodes from the next step on."""
        sequence.stage = Stage.DECODING
        sequence.decode_epoch = self.tick - sequence.generated_tokens
        insort(self.sequences, sequence, key=_admission)
        self._computed_at_tick_0 += sequence.request.prompt_tokens - 1 - sequence.decode_epoch
        self._expect_finish(sequence, sequence.decode_epoch + sequence.output_tokens)
        self.expect_boundary(sequence)

    def stop(self, sequence: SequenceState) -> None:
        """It no longer decodes: write its progress down."""
        self.sequences.remove(sequence)
        _discard(self._boundaries, sequence.boundary_tick, sequence)
        _discard(self._finishes, sequence.finish_tick, sequence)
        self._computed_at_tick_0 -= sequence.request.prompt_tokens - 1 - sequence.decode_epoch
        sequence.generated_tokens = self.tick - sequence.decode_epoch
        sequence.computed_tokens = sequence.request.prompt_tokens + sequence.generated_tokens - 1

    def hold(self, sequences: Iterable[SequenceState]) -> None:
        """These get no token in the step under way: everything about them happens one tick later."""
        for sequence in sequences:
            sequence.decode_epoch += 1
            self._computed_at_tick_0 -= 1
            _discard(self._finishes, sequence.finish_tick, sequence)
            self._expect_finish(sequence, sequence.finish_tick + 1)
            _discard(self._boundaries, sequence.boundary_tick, sequence)
            self._note_boundary(sequence, sequence.boundary_tick + 1)

    def computed_tokens(self, sequence: SequenceState) -> int:
        """Tokens of a decoding sequence whose KV is computed: all but its last one."""
        return sequence.request.prompt_tokens - 1 + self.tick - sequence.decode_epoch

    @property
    def resident_tokens_after_step(self) -> int:
        """The same, summed over all decoding sequences, once the step under way is done."""
        return self._computed_at_tick_0 + (self.tick + 1) * len(self.sequences)

    def take_boundaries(self) -> list[SequenceState]:
        """Sequences whose next token starts or fills a KV block; `expect_boundary` renews them."""
        return self._boundaries.pop(self.tick, [])

    def expect_boundary(self, sequence: SequenceState, *, after_this_step: bool = False) -> None:
        """Note when this sequence next starts or fills a block."""
        tick = self.tick + after_this_step
        offset = (self.computed_tokens(sequence) + after_this_step) % self._block_size
        self._note_boundary(sequence, tick if offset == 0 else tick + self._block_size - 1 - offset)

    def advance(self) -> list[SequenceState]:
        """A step is done: every sequence has one more token. Those for which it was the last."""
        self.tick += 1
        return self._finishes.pop(self.tick, [])

    def _expect_finish(self, sequence: SequenceState, tick: int) -> None:
        sequence.finish_tick = tick
        self._finishes.setdefault(tick, []).append(sequence)

    def _note_boundary(self, sequence: SequenceState, tick: int) -> None:
        sequence.boundary_tick = tick
        self._boundaries.setdefault(tick, []).append(sequence)


def _discard(due: dict[int, list[SequenceState]], tick: int, sequence: SequenceState) -> None:
    """Take a sequence off a calendar, unless its day has come already."""
    sequences = due.get(tick)
    if sequences is not None and sequence in sequences:
        sequences.remove(sequence)
        if not sequences:
            del due[tick]
