"""The contenders one after the other on the same requests, in wall clock, on this machine.

Absolute times depend on the machine and on what else it does; the ratios between contenders are what counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.contenders import MODEL, Contender, Stage, groups_of, served_by
from benchmarks.replay import ReplayResult, replay
from benchmarks.score import Score, score
from benchmarks.simulation import RunRecord
from benchmarks.traces import TraceRequest
from ext_proc.settings import Targets
from gateway.config_groups import EmbeddedGroup

SLOW_RANK_STREAMS = 120
SLOW_RANK_CONCURRENCY = 12
SLOW_RANK_OUTPUT_TOKENS = 10
SLOW_RANK_FACTOR = 8


class WallClockResult(msgspec.Struct, frozen=True):
    """One contender's run."""

    contender: str
    score: Score
    elapsed_s: float
    statuses: dict[str, int]
    by_rank: dict[str, int]
    """Requests per rank, from the ranks' own counters."""


async def compare(
    contenders: Mapping[str, Contender],
    requests: Sequence[TraceRequest],
    groups: Callable[[], tuple[EmbeddedGroup, ...]],
    targets: Targets,
    *,
    concurrency: int | None = None,
    time_scale: float = 1.0,
    on_done: Callable[[str, int, int], None] = lambda contender, done, total: None,
) -> AsyncIterator[WallClockResult]:
    """Each contender in front of ranks of its own, from `groups`; all get the same requests."""
    for name, contender in contenders.items():
        with tempfile.TemporaryDirectory(prefix="wavegate-bench-") as folder:
            stage = Stage(
                groups(),
                Path(folder),
                {
                    "ttft_ms": targets.ttft_s * 1000 / time_scale,
                    "tpot_ms": targets.tpot_s * 1000 / time_scale,
                },
            )
            async with contender(stage) as url:
                result = await replay(
                    url,
                    MODEL,
                    requests,
                    concurrency=concurrency,
                    time_scale=time_scale,
                    on_done=lambda done, total, name=name: on_done(name, done, total),  # type: ignore[misc]
                )
                served = await served_by(stage)
            yield _result(name, result, served, targets)


def slow_rank_groups() -> tuple[EmbeddedGroup, ...]:
    """Two independent ranks, one of them much slower."""
    slow, fast = groups_of(1, 2, ())
    return replace_args(slow, ("--slowdown", str(SLOW_RANK_FACTOR))), fast


def slow_rank_requests() -> list[TraceRequest]:
    """Short prompts and short answers."""
    return [TraceRequest(0.0, 20, SLOW_RANK_OUTPUT_TOKENS) for _ in range(SLOW_RANK_STREAMS)]


def replace_args(group: EmbeddedGroup, args: tuple[str, ...]) -> EmbeddedGroup:
    """The group with these further options for its ranks."""
    return group.model_copy(update={"args": (*group.args, *args)})


def _result(name: str, result: ReplayResult, served: dict[str, int], targets: Targets) -> WallClockResult:
    record = RunRecord(result.served, lost_share=0.0, steps=[])
    return WallClockResult(name, score(record, targets), result.elapsed_s, dict(result.statuses), served)
