"""A record of every step of one engine, one JSON line each: what was scheduled and what it cost.

For studying schedules and for comparing wall-clock runs with virtual time. Off unless a file is named.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vllm_ranks.engine.core import EngineCore, StepWork
from vllm_ranks.engine.plan import PlanRecord


class StepRecord(msgspec.Struct, frozen=True):
    """One line."""

    wave: int | None
    """`None` for an engine that steps alone."""
    step: int | None
    """Steps of this wave before this one."""
    kind: str
    """`model` or `dummy`."""
    own_cost_s: float
    step_cost_s: float
    """Of the group's slowest rank."""
    plan: PlanRecord | None


class StepTrace:
    """An open trace file."""

    def __init__(self, path: str, rank: int) -> None:
        """`{rank}` in the path is replaced, so that engines started with the same options do not collide.

        Raises:
            OSError: the file cannot be written.
        """
        self._file = Path(path.replace("{rank}", str(rank))).open("wb", buffering=0)  # noqa: SIM115
        self._encode = msgspec.json.Encoder().encode

    def write(self, core: EngineCore, work: StepWork, step_cost_s: float) -> None:
        """Record a step that has just been executed."""
        waves = core.waves
        record = StepRecord(
            wave=None if waves is None else waves.current_wave,
            step=None if waves is None else waves.step_counter,
            kind=work.kind.name.lower(),
            own_cost_s=work.cost_s,
            step_cost_s=step_cost_s,
            plan=None if work.plan is None else work.plan.record(),
        )
        self._file.write(self._encode(record) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
