"""Traffic and faults that no public trace has: where does the default policy lose, and by how much?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from benchmarks.matrix import Cell, best_budgets, run_matrix
from benchmarks.simulation import Deployment, Observation
from benchmarks.suite import OURS
from benchmarks.traces import Shape, TraceRequest, generate
from ext_proc.policies import BUILT_IN
from ext_proc.settings import Targets

LOSS_FROM = 0.9
"""Less than this share of the best peer's goodput counts as a loss."""
DURATION_S = 240.0
LATER_S = 120.0
"""When outputs become ten times longer, and scrapes begin to fail."""
LONGEST_OUTPUT_TOKENS = 8_000
"""No output becomes longer than this."""

MIXED = Shape(rate_per_s=3.0, prompt_tokens=(200, 30_000), output_tokens=(20, 800))


@dataclass(frozen=True, slots=True)
class Situation:
    """One kind of traffic on one deployment, seen more or less well."""

    name: str
    requests: Sequence[TraceRequest]
    deployment: Deployment = field(default_factory=Deployment)
    observation: Observation = field(default_factory=Observation)
    targets: Targets = field(default_factory=Targets)


class Outcome(msgspec.Struct, frozen=True):
    """What came of a situation."""

    situation: str
    ours: Cell
    best_peer: Cell

    @property
    def is_loss(self) -> bool:
        """Whether a peer is clearly better."""
        return self.ours.score.goodput < LOSS_FROM * self.best_peer.score.goodput


def situations(seed: int = 0) -> list[Situation]:
    """All of them, generated."""
    mixed = generate(MIXED, DURATION_S, seed)
    spread = replace(MIXED, rate_per_s=6.0)
    return [
        Situation("mixed", mixed),
        Situation(
            "short prompts only",
            generate(Shape(60.0, (20, 400), (20, 400)), DURATION_S / 4, seed),
        ),
        Situation("long prompts only", generate(Shape(0.9, (15_000, 60_000), (50, 400)), DURATION_S, seed)),
        Situation(
            "bursts of 64", generate(replace(MIXED, prompt_tokens=(200, 8_000), burst=64), DURATION_S, seed)
        ),
        Situation("one slow rank", mixed, Deployment(slow_ranks={3: 2.0})),
        Situation("one slow rank of a dense pool", mixed, Deployment(lock_step=False, slow_ranks={3: 4.0})),
        Situation("outputs ten times longer than learned", _longer_later(mixed)),
        Situation(
            "scrapes fail for 10 s", mixed, observation=Observation(scrapes_fail=(LATER_S, LATER_S + 10.0))
        ),
        Situation(
            "token estimates twice too high", mixed, observation=Observation(token_estimate_factor=2.0)
        ),
        Situation(
            "token estimates half of what they are", mixed, observation=Observation(token_estimate_factor=0.5)
        ),
        Situation("1 group of 16", generate(spread, DURATION_S, seed), Deployment(ranks=16)),
        Situation("4 groups of 4", generate(spread, DURATION_S, seed), Deployment(groups=4, ranks=4)),
        Situation("dense pool", mixed, Deployment(lock_step=False)),
    ]


def run_situations(
    chosen: Sequence[Situation],
    *,
    budgets: Sequence[int],
    seed: int = 0,
    on_done: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Iterator[Outcome]:
    """Every policy in every situation, each at its best budget."""
    for situation in chosen:
        best = best_budgets(
            run_matrix(
                situation.requests,
                situation.deployment,
                policies=tuple(BUILT_IN),
                budgets=budgets,
                targets=[situation.targets],
                observation=situation.observation,
                seed=seed,
                on_done=partial(on_done, situation.name),
            )
        )
        ours = next(cell for cell in best if cell.policy == OURS)
        peers = [cell for cell in best if cell.policy != OURS]
        yield Outcome(situation.name, ours, max(peers, key=lambda cell: cell.score.goodput))


def _longer_later(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    # All are kept: thinned out until the load is the same again, late requests would meet any target.
    return [
        replace(one, output_tokens=min(LONGEST_OUTPUT_TOKENS, 10 * one.output_tokens))
        if one.at_s >= LATER_S
        else one
        for one in requests
    ]
