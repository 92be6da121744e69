"""A decision in one line of words and numbers, for a response header or a log. Pure.

    rank=g0/1 reason=policy held_ms=0; g0/1 0.514: wait 0.000 prefill 0.246 … cached 0; g0/0 0.820: …

First the rank picked, then the cheapest others, each with the cost's parts in the policy's unit (seconds for
the default one), and the prompt tokens it probably has in its cache. At the end, what was ignored.
"""

from __future__ import annotations

from ext_proc.decision import Placed
from ext_proc.protocol_names import PRIORITY_HEADER
from ext_proc.vocabulary import RankCost

PRIORITY_IGNORED = f"{PRIORITY_HEADER} is ignored, being no integer of up to 9 digits"


def in_one_line(placed: Placed, *, priority_is_ignored: bool = False) -> str:
    """What was decided and what the ranks would have cost, in ASCII, without a word of the client's."""
    pick = placed.pick
    head = f"rank={pick.first.name} reason={pick.reason.value} held_ms={placed.held_s * 1e3:.0f}"
    notes = [PRIORITY_IGNORED] if priority_is_ignored else []
    return "; ".join([head, *(_of_rank(one) for one in pick.costs), *notes])


def _of_rank(one: RankCost) -> str:
    parts = " ".join(f"{name} {seconds:.3f}" for name, seconds in one.parts.items())
    return f"{one.rank.name} {one.cost:.3f}: {parts} cached {one.cached_tokens}"
