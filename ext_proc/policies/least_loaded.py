"""Least loaded: the rank where one more request would wait for the fewest others, in seconds.

    cost = (requests on the rank + 1) × seconds a request takes on its group

Requests on the rank are own reservations plus what the rank reports beyond them (`Ledger.loads`). The second
factor is learned from ended requests; it is the same for all ranks of a group, which step together, so inside
a group only the counts decide. Prompt length plays no part.
"""

from __future__ import annotations

from ext_proc.ledger import Ledger
from ext_proc.vocabulary import PickReason, RequestFacts

REASON = PickReason.LEAST_LOADED


def costs(_facts: RequestFacts, ledger: Ledger, now_s: float) -> list[float]:
    """Expected seconds for each rank, in the order of `ledger.accounts`; lower is better."""
    mean_s = ledger.mean_request_s()
    request_s = {group.name: group.expected_request_s(mean_s, now_s) for group in ledger.groups}
    return [
        (load + 1.0) * request_s[account.rank.group]
        for load, account in zip(ledger.loads(now_s), ledger.accounts, strict=True)
    ]
