"""The prefills one rank has ahead of it, as far as the gateway can know.

A rank computes prompts in order of arrival. It does not say which prompt it is at, only how many first tokens
it has produced (`vllm:time_to_first_token_seconds_count`), so the queue is emptied from the front by that
counter, and in between the model of step times tells how far the first prompt has come. When no report comes,
the model alone decides; the next report puts it right. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

LARGEST_ASSUMED_PROGRESS = 0.95
"""A prefill is not taken for done before the rank says so, only for nearly done."""


@dataclass(slots=True, eq=False)
class Prefill(Generic[Owner]):
    """One prompt to be computed."""

    owner: Owner
    tokens: int
    """Prompt tokens the rank probably does not have in its cache."""


class PrefillQueue(Generic[Owner]):
    """Prompts placed on one rank whose first token has not been seen."""

    __slots__ = ("_assumed_done", "_entries", "_head_started_s", "tokens")

    def __init__(self) -> None:
        self._entries: deque[Prefill[Owner]] = deque()
        self._head_started_s = 0.0
        self._assumed_done = 0
        self.tokens = 0
        """Tokens of all prompts in the queue, those of the first counted whole."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, owner: Owner, tokens: int, now_s: float) -> None:
        """A prompt has been placed on the rank."""
        if not self._entries:
            self._head_started_s = now_s
        self._entries.append(Prefill(owner, tokens))
        self.tokens += tokens

    def remaining_tokens(self, now_s: float, tokens_per_s: float) -> float:
        """Tokens still to be computed if the rank computes `tokens_per_s`."""
        if not self._entries:
            return 0.0
        done = (now_s - self._head_started_s) * tokens_per_s
        at_most = LARGEST_ASSUMED_PROGRESS * self._entries[0].tokens
        return self.tokens - (done if done < at_most else at_most)

    def head(self, now_s: float) -> tuple[Prefill[Owner], float] | None:
        """The prompt being computed, and for how many seconds it has been."""
        if not self._entries:
            return None
        return self._entries[0], now_s - self._head_started_s

    def begun(self, now_s: float, tokens_per_s: float) -> int:
        """How many prompts the rank has begun with if it computes `tokens_per_s`; the others wait there."""
        done = (now_s - self._head_started_s) * tokens_per_s
        count = tokens_before = 0
        for entry in self._entries:
            if count and tokens_before >= done:
                break
            count += 1
            tokens_before += entry.tokens
        return count

    def first_tokens_reported(self, count: int, now_s: float) -> list[Prefill[Owner]]:
        """The rank has produced `count` first tokens since the report before. Those they belong to.

        First tokens already assumed, because their request ended or no report came, are not counted again;
        an assumption lasts until the next report and no longer.
        """
        fresh = max(0, count - self._assumed_done)
        self._assumed_done = 0
        return [self._pop(now_s) for _ in range(min(fresh, len(self._entries)))]

    def assume_head_done(self, now_s: float) -> Prefill[Owner]:
        """No report comes, and by the model the first prompt must be done."""
        self._assumed_done += 1
        return self._pop(now_s)

    def leave(self, owner: Owner, now_s: float, *, had_first_token: bool) -> bool:
        """A request ended; False if its first token had been seen before and it was not in the queue."""
        entry = next((entry for entry in self._entries if entry.owner == owner), None)
        if entry is None:
            return False
        if entry is self._entries[0]:
            self._pop(now_s)
        else:
            self.tokens -= entry.tokens
            self._entries.remove(entry)
        self._assumed_done += had_first_token
        return True

    def clear(self) -> list[Prefill[Owner]]:
        """The rank has restarted: whatever it was computing is lost."""
        entries = list(self._entries)
        self._entries.clear()
        self.tokens = 0
        self._assumed_done = 0
        return entries

    def _pop(self, now_s: float) -> Prefill[Owner]:
        entry = self._entries.popleft()
        self.tokens -= entry.tokens
        self._head_started_s = max(self._head_started_s, now_s)
        return entry
