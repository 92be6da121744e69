"""The default policy: the seconds it costs, this request and everybody else, to place it on a rank.

It picks the rank where the request has its first token soonest, but counts prefill twice, because in a
lock-step group the others wait for it too. So a rank that has the prompt in its cache wins unless its queue
is longer by twice what the cache saves.

    cost = wait      prompt tokens ahead on the rank / its prefill rate
         + prefill   the request's own uncached tokens / the same rate
         + others    the same again
         + decode    expected output tokens × (the group's recent step time
                     + what a sequence adds to a step × (sequences on a rank + all that step along))
         + kv        resident KV tokens × KV_WEIGHT / the same rate
         + full      a barrier as the KV cache fills up

All in seconds, from the step times learned for the group. Without a report the rank's queue is known from own
reservations alone; without cache information all of the prompt counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import ClassVar

from ext_proc.groups import GroupAccount
from ext_proc.policy import PickView

OTHERS_WEIGHT = 1.0
"""How much the others' waiting for a prefill counts beside the request's own."""
KV_WEIGHT = 0.02
"""Prompt tokens that a resident KV token is worth: it lengthens each step of its rank a little."""
FOREIGN_REQUEST_TOKENS = 1024
"""Prompt tokens assumed ahead for a request that another client sent to the rank."""
FULL_FROM = 0.85
"""KV use from which the barrier rises."""
FULL_S = 1.0
"""Height of the barrier half-way between there and full."""
FADES_IN_S = 60.0
"""Step times not observed for this long count only 1/e against the mean of all groups."""
PARTS = ("wait", "prefill", "others", "decode", "kv", "full")


class Lockstep:
    """See the module's docstring."""

    name: ClassVar[str] = "lockstep"
    holds: ClassVar[bool] = True
    in_seconds: ClassVar[bool] = True

    def costs(self, view: PickView) -> Sequence[float]:
        """Seconds per rank."""
        return [a + b + c + d + e + f for a, b, c, d, e, f in self._parts(view)]

    def explain(self, view: PickView) -> Sequence[Mapping[str, float]]:
        """The same, by its parts."""
        return [dict(zip(PARTS, parts, strict=True)) for parts in self._parts(view)]

    def _parts(self, view: PickView) -> list[tuple[float, float, float, float, float, float]]:
        now_s, prompt_tokens = view.now_s, view.facts.prompt_tokens
        token_s = _token_s({account.group: None for account in view.accounts}, now_s)
        rows = []
        group = None
        for account, foreign, cached in zip(
            view.accounts, view.foreign_requests, view.cached_tokens, strict=True
        ):
            if account.group is not group:
                group = account.group
                tokens_per_s = group.prefill_tokens_per_s
                second_per_token = 1.0 / tokens_per_s
                decode_s = view.expected_output_tokens * token_s[group]
                steps = group.steps
            ahead = account.prefills.remaining_tokens(now_s, tokens_per_s)
            prefill_s = (prompt_tokens - cached) * second_per_token
            rows.append(
                (
                    (ahead + foreign * FOREIGN_REQUEST_TOKENS) * second_per_token,
                    prefill_s,
                    OTHERS_WEIGHT * prefill_s,
                    decode_s,
                    KV_WEIGHT * account.resident_kv_tokens(steps) * second_per_token,
                    _full_s(account.report.kv_cache_usage) if account.report is not None else 0.0,
                )
            )
        return rows


def _token_s(groups: Iterable[GroupAccount], now_s: float) -> dict[GroupAccount, float]:
    """What an output token costs on each group, the request itself and those it decodes with.

    How long a group's steps are fades towards the mean of all groups when it has not been observed for long:
    else a group once seen to be slow would get no request that could show that it has recovered.
    """
    steps = {group: group.decode_step_s for group in groups}
    mean_s = sum(steps.values()) / len(steps)
    costs = {}
    for group, decode_step_s in steps.items():
        trust = exp((group.learned_s - now_s) / FADES_IN_S)
        step_s = trust * decode_step_s + (1 - trust) * mean_s
        sequences = sum(account.reservations for account in group.accounts)
        per_rank = sequences / len(group.accounts)
        slowed_by_one_more = sequences if group.lock_step else per_rank
        added_s = (per_rank + slowed_by_one_more) * group.times.costs.per_decode_sequence_s
        costs[group] = step_s * group.recent_step_s / decode_step_s + added_s
    return costs


def _full_s(kv_cache_usage: float) -> float:
    if kv_cache_usage <= FULL_FROM:
        return 0.0
    return FULL_S * (kv_cache_usage - FULL_FROM) / max(1.0 - kv_cache_usage, 0.001)
