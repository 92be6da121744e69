"""How well a run served its requests, in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.simulation import RunRecord, Served
from ext_proc.settings import Targets


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of a quantity."""

    p50: float
    p90: float
    p99: float


class Score(msgspec.Struct, frozen=True):
    """One run, judged by one pair of targets."""

    requests: int
    goodput: float
    """Share of requests that met both targets."""
    ttft_met: float
    tpot_met: float
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    held_s: Spread
    longest_hold_s: float
    refused: int
    cache_hit_share: float
    """Prompt tokens that came from a prefix cache."""
    lost_share: float
    """Ranks' stepping time spent waiting for the slowest."""


def score(record: RunRecord, targets: Targets) -> Score:
    """Judge a run. Requests that were refused, or never ended, met no target."""
    served = record.served
    ended = [one for one in served if one.finished_s is not None]
    count = len(served)
    return Score(
        requests=count,
        goodput=sum(meets_ttft(one, targets) and meets_tpot(one, targets) for one in served) / count,
        ttft_met=sum(meets_ttft(one, targets) for one in served) / count,
        tpot_met=sum(meets_tpot(one, targets) for one in served) / count,
        ttft_s=spread([one.ttft_s for one in served if one.ttft_s is not None]),
        tpot_s=spread(
            [one.tpot_s for one in ended if one.tpot_s is not None and one.request.output_tokens > 1]
        ),
        e2e_s=spread([one.finished_s - one.request.at_s for one in ended if one.finished_s is not None]),
        held_s=spread([one.held_s for one in served]),
        longest_hold_s=max(one.held_s for one in served),
        refused=sum(one.refused for one in served),
        cache_hit_share=sum(one.cached_tokens for one in ended)
        / max(1, sum(one.request.prompt_tokens for one in ended)),
        lost_share=record.lost_share,
    )


def meets_ttft(served: Served, targets: Targets) -> bool:
    """Whether the first token came in time."""
    return served.ttft_s is not None and served.ttft_s <= targets.ttft_s


def meets_tpot(served: Served, targets: Targets) -> bool:
    """Whether the other tokens came fast enough, on the mean."""
    return served.tpot_s is not None and served.tpot_s <= targets.tpot_s


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by the nearest rank; zero of nothing."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0, 0.0)
    return Spread(*(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)))
