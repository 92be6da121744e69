"""The interface of a policy: from one request and the ledger's picture to a cost per rank.

A policy is one module in `ext_proc.policies` with one class, registered by one line there. It must be pure:
its only inputs are the view it is given and the random source in it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ext_proc.accounts import RankAccount
from ext_proc.vocabulary import RequestFacts


@dataclass(slots=True)
class PickView:
    """All that a policy may look at."""

    facts: RequestFacts
    now_s: float
    waited_s: float
    """How long the request has been held."""
    accounts: Sequence[RankAccount]
    """The ranks to choose from, in the order of the configuration."""
    foreign_requests: Sequence[float]
    """Requests of others expected on each of them."""
    cached_tokens: Sequence[int]
    """Prompt tokens that each of them probably has in its prefix cache."""
    expected_output_tokens: int
    rng: random.Random


class Policy(Protocol):
    """Turns a view into costs."""

    name: ClassVar[str]
    holds: ClassVar[bool]
    """Whether admission may hold requests for it; otherwise every request is placed when it arrives."""
    in_seconds: ClassVar[bool]
    """Whether costs are seconds, so that it means something how much more one rank costs than another."""

    def costs(self, view: PickView) -> Sequence[float]:
        """The cost of each rank of the view; lower is better."""
        ...

    def explain(self, view: PickView) -> Sequence[Mapping[str, float]]:
        """The named parts that each rank's cost is the sum of."""
        ...


class ScorePolicy(ABC):
    """A policy whose cost is one number without parts."""

    name: ClassVar[str]
    holds: ClassVar[bool] = False
    in_seconds: ClassVar[bool] = False

    @abstractmethod
    def costs(self, view: PickView) -> Sequence[float]:
        """The cost of each rank of the view; lower is better."""

    def explain(self, view: PickView) -> Sequence[Mapping[str, float]]:
        """The one part there is."""
        return [{"score": cost} for cost in self.costs(view)]
