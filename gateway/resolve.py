"""Settles what a configuration leaves to be found out: which models are mixtures of experts.

A dense model's group becomes as many groups of one. Reads config.json files on this machine, nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from gateway.config import Config
from gateway.config_groups import Group, VllmGroup
from vllm_ranks.launcher.model_kind import is_mixture_of_experts

ModelKind = Callable[[str, Mapping[str, str]], bool | None]


class Unresolved(Exception):
    """What has to be known cannot be found out; the message says what to write into the file."""


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """Something that has to be known before a launch and cannot be found out here."""

    field: str
    """Key path of what would answer it."""
    question: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.question}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration in which every group is what it is called, but for the open questions."""

    config: Config
    notes: tuple[str, ...]
    """What was found out and done, a line each."""
    open_questions: tuple[OpenQuestion, ...] = ()


def resolve(config: Config, is_moe: ModelKind = is_mixture_of_experts) -> Resolved:
    """Find out what the groups' models are. Raises Unresolved."""
    resolved = resolve_what_can_be(config, is_moe)
    if resolved.open_questions:
        raise Unresolved("\n".join(map(str, resolved.open_questions)))
    return resolved


def resolve_what_can_be(config: Config, is_moe: ModelKind = is_mixture_of_experts) -> Resolved:
    """The same, but a group whose model's kind cannot be told stays as it is, with an open question.

    Raises Unresolved if the replicas of dense models clash with other groups.
    """
    groups: list[Group] = []
    notes: list[str] = []
    open_questions: list[OpenQuestion] = []
    for position, group in enumerate(config.groups):
        if not isinstance(group, VllmGroup):
            groups.append(group)
            continue
        moe = group.moe if group.moe is not None else is_moe(group.served, {**os.environ, **group.env})
        if moe is None and group.data_parallel_size > 1:
            open_questions.append(
                OpenQuestion(
                    f"groups[{position}].moe",
                    f"whether {group.served} is a mixture of experts cannot be told, for its config.json is "
                    "not on this machine",
                    "write moe: true or moe: false",
                )
            )
            groups.append(group)
        elif moe or group.data_parallel_size == 1:
            groups.append(group.model_copy(update={"moe": bool(moe)}))
        else:
            replicas = group.replicas()
            groups += replicas
            notes.append(
                f"group {group.name}: {group.served} is a dense model, which vLLM does not run in external "
                f"load-balancer mode: {len(replicas)} independent replicas, groups {replicas[0].name} to "
                f"{replicas[-1].name}, each of one rank"
            )
    try:
        # Anew, because replicas have names that other groups may have.
        data = config.model_dump(by_alias=True)
        data["groups"] = [group.model_dump(by_alias=True) for group in groups]
        resolved = Config.model_validate(data)
    except ValidationError as error:
        reasons = "\n".join(str(detail["ctx"]["error"]) for detail in error.errors())
        raise Unresolved(f"with a group for each replica of dense models, {reasons}") from None
    return Resolved(resolved, tuple(notes), tuple(open_questions))
