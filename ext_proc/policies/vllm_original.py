"""What vLLM's internal load balancer first picked: 4 × waiting + running (before vllm-project/vllm#47420).

Counts, correction since the last report and the moving start of the scan are those of `vllm_internal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ext_proc.policies.vllm_internal import TIE
from ext_proc.policy import PickView, ScorePolicy


class VllmOriginal(ScorePolicy):
    """The first formula."""

    name: ClassVar[str] = "vllm_original"

    def costs(self, view: PickView) -> Sequence[float]:
        """The score of each rank."""
        ranks = len(view.accounts)
        turn = sum(account.picks for account in view.accounts)
        costs = []
        for index, account in enumerate(view.accounts):
            report = account.report
            waiting = account.picks_since_report + (report.waiting if report else 0)
            running = report.running if report else 0
            costs.append(4.0 * waiting + running + TIE * ((index - turn) % ranks))
        return costs
