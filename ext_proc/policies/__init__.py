"""The policies: one module each. Adding one is a module here and a line below, or an entry point elsewhere.

A package that is installed beside wavegate can bring its own: a class with the interface of
`ext_proc.policy.Policy`, named in the entry point group `wavegate.policies`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

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
MAX_ERROR_CHARS = 300
_FLAGS, _METHODS = ("holds", "in_seconds"), ("costs", "explain")
"""What is asked of a policy, as `ext_proc.policy.Policy` describes it."""

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
        ValueError: there is none of that name, and the message lists those there are; or a package brings one
            that is none, and the message says what to change.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _brought(entry_point)
    raise ValueError(f"no policy is called {name!r}; there are: {', '.join(policy_names())}")


def _brought(entry_point: EntryPoint) -> Policy:
    """The policy that another package brings. Raises ValueError."""
    package = f" of the package {entry_point.dist.name}" if entry_point.dist is not None else ""
    where = f"{entry_point.name} is {entry_point.value}{package}"
    try:
        policy: Policy = entry_point.load()()
    except Exception as error:  # whatever code of others raises, the reader of the configuration must know
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{where}, which cannot be made ({said[:MAX_ERROR_CHARS]}); correct that package's entry "
            f"point in the group {ENTRY_POINT_GROUP}, or what it names"
        ) from error
    wrong = [
        f"{name} (true or false)" for name in _FLAGS if not isinstance(getattr(policy, name, None), bool)
    ]
    wrong += [f"{name}(view)" for name in _METHODS if not callable(getattr(policy, name, None))]
    if wrong:
        raise ValueError(
            f"{where}, which lacks {', '.join(wrong)}; derive the class from ext_proc.policy.ScorePolicy, "
            "which leaves costs(view) to be written, or give it all of ext_proc.policy.Policy"
        )
    return policy
