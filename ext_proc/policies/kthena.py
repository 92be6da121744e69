"""kthena's `least-request` plugin (volcano-sh/kthena pkg/kthena-router/scheduler/plugins/least_request.go).

    base = in flight + 100 × max(in flight - running, 0)

The lowest base has the highest score. Ranks where 10 or more requests wait are left out, unless all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

from ext_proc.policy import PickView, ScorePolicy

MAX_WAITING = 10
NOT_RUNNING_WEIGHT = 100


class Kthena(ScorePolicy):
    """Requests in flight, those that do not run yet a hundredfold."""

    name: ClassVar[str] = "kthena"

    def costs(self, view: PickView) -> Sequence[float]:
        """The base of each rank."""
        reports = [account.report for account in view.accounts]
        crowded = [report is not None and report.waiting >= MAX_WAITING for report in reports]
        leave_out = not all(crowded)
        costs = []
        for account, report, is_crowded in zip(view.accounts, reports, crowded, strict=True):
            running = report.running if report else 0
            not_running = max(account.reservations - running, 0)
            base = account.reservations + NOT_RUNNING_WEIGHT * not_running
            costs.append(inf if is_crowded and leave_out else base)
        return costs
