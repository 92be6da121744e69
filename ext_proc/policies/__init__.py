"""The policies: one module each. Adding one is a module here and a line below, or an entry point elsewhere.

A package that is installed beside wavegate can bring its own: a class with the interface of
`ext_proc.policy.Policy`, named in the entry point group `wavegate.policies`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from ext_proc.policies.cache_aware import CacheAware
from ext_proc.policies.dynamo_cost import DynamoCost
from ext_proc.policies.kthena import Kthena
from ext_proc.policies.least_request import LeastRequest
from ext_proc.policies.llm_d import LlmD
from ext_proc.policies.lockstep import Lockstep
from ext_proc.policies.power_of_two import PowerOfTwo
from ext_proc.policies.random_choice import RandomChoice
from ext_proc.policies.round_robin import RoundRobin
from ext_proc.policies.smg_least_load import SmgLeastLoad
from ext_proc.policies.vllm_internal import VllmInternal
from ext_proc.policies.vllm_original import VllmOriginal
from ext_proc.policy import Policy

ENTRY_POINT_GROUP = "wavegate.policies"

BUILT_IN: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Lockstep,
        CacheAware,
        DynamoCost,
        Kthena,
        LeastRequest,
        LlmD,
        PowerOfTwo,
        RandomChoice,
        RoundRobin,
        SmgLeastLoad,
        VllmInternal,
        VllmOriginal,
    )
}


def policy_names() -> list[str]:
    """Every policy that can be asked for, the default first."""
    return [*BUILT_IN, *sorted(set(entry_points(group=ENTRY_POINT_GROUP).names) - BUILT_IN.keys())]


def make_policy(name: str) -> Policy:
    """A policy by its name.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        policy: Policy = entry_point.load()()
        return policy
    raise ValueError(f"no policy is called {name!r}; there are: {', '.join(policy_names())}")
