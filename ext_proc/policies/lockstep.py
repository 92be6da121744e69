"""The default policy: the seconds it costs, this request and everybody else, to place it on a rank.

It picks the rank where the request has its first token soonest, but counts prefill twice, because those
that decode wait for it too: on all ranks of a lock-step group, where each step is as long as the slowest
rank's. So, while both would be in time, a rank that has the prompt in its cache wins until its queue is
longer by twice what the cache saves; a first token that would miss its target makes a rank dearer by half
the time to that token.

    cost = wait      prompt tokens ahead on the rank / its prefill rate
         + prefill   the request's own uncached tokens / the same rate
         + others    the same again, even where it fits beside a longer prompt of another rank
         + late      if the first token then misses the TTFT target: half the time from arrival to it
         + decode    expected output tokens × (the group's recent step time
                     + what one more sequence adds to the steps of all that step along)
         + kv        KV tokens resident on the rank × KV_WEIGHT / the same rate
         + full      a barrier as the KV cache fills up, by the rank's last report

All in seconds, from the step times learned for the group. `decode` is the same for all ranks of a group: it
chooses between groups. What is ahead on a rank is known from this gateway's own reservations; a request
that another client sent there counts as FOREIGN_REQUEST_TOKENS. Without cache information all of the prompt
counts. Who goes first among equals, or to a rank it has an affinity to, is the picker's business; whether a
prompt waits to be read beside others', admission's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import ClassVar

from ext_proc.groups import GroupAccount
from ext_proc.policy import PickView

OTHERS_WEIGHT = 1.0
"""How much the others' waiting for a prefill counts beside the request's own."""
LATE_WEIGHT = 0.5
"""How much more the time from arrival to the first token counts where that misses its target."""
LATE_FROM_SHARE = 0.95
"""From this share of the TTFT target on a first token is expected to miss it."""
KV_WEIGHT = 0.02
"""Prompt tokens that a resident KV token counts as: it makes each step of its rank a little longer."""
FOREIGN_REQUEST_TOKENS = 1024
"""Prompt tokens assumed ahead for a request that another client sent to the rank."""
FULL_FROM = 0.85
"""KV use from which the barrier rises."""
FULL_S = 1.0
"""Height of the barrier half-way between there and full."""
FADES_IN_S = 60.0
"""Step times not observed for this long count only 1/e against the mean of all groups."""
PARTS = ("wait", "prefill", "others", "late", "decode", "kv", "full")


class Lockstep:
    """See the module's docstring."""

    name: ClassVar[str] = "lockstep"
    holds: ClassVar[bool] = True
    in_seconds: ClassVar[bool] = True

    def costs(self, view: PickView) -> Sequence[float]:
        """Seconds per rank."""
        return [sum(parts) for parts in self._parts(view)]

    def explain(self, view: PickView) -> Sequence[Mapping[str, float]]:
        """The same, by its parts."""
        return [dict(zip(PARTS, parts, strict=True)) for parts in self._parts(view)]

    def _parts(self, view: PickView) -> list[tuple[float, float, float, float, float, float, float]]:
        now_s, prompt_tokens = view.now_s, view.facts.prompt_tokens
        groups = dict.fromkeys(account.group for account in view.accounts)
        token_s = _seconds_per_output_token(groups, now_s)
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
                late_from_s = LATE_FROM_SHARE * group.targets.ttft_s
                steps = group.steps
            ahead = account.prefills.remaining_tokens(now_s, tokens_per_s)
            prefill_s = (prompt_tokens - cached) * second_per_token
            wait_s = (ahead + foreign * FOREIGN_REQUEST_TOKENS) * second_per_token
            ttft_s = view.waited_s + wait_s + prefill_s
            rows.append(
                (
                    wait_s,
                    prefill_s,
                    OTHERS_WEIGHT * prefill_s,
                    LATE_WEIGHT * ttft_s if ttft_s > late_from_s else 0.0,
                    decode_s,
                    KV_WEIGHT * account.resident_kv_tokens(steps) * second_per_token,
                    _full_s(account.report.kv_cache_usage) if account.report is not None else 0.0,
                )
            )
        return rows


def _seconds_per_output_token(groups: Iterable[GroupAccount], now_s: float) -> dict[GroupAccount, float]:
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
        requests = sum(account.reservations for account in group.accounts)
        step_along = requests if group.lock_step else requests / len(group.accounts)
        added_s = step_along * group.times.costs.per_decode_sequence_s
        stretched_by_prefill = group.recent_step_s / decode_step_s
        costs[group] = step_s * stretched_by_prefill + added_s
    return costs


def _full_s(kv_cache_usage: float) -> float:
    if kv_cache_usage <= FULL_FROM:
        return 0.0
    return FULL_S * (kv_cache_usage - FULL_FROM) / max(1.0 - kv_cache_usage, 0.001)
