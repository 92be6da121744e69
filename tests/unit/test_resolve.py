"""What a configuration leaves to be found out: is the model a mixture of experts?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.config import Config
from gateway.config_groups import VllmGroup
from gateway.resolve import Resolved, Unresolved, resolve, resolve_what_can_be


def config(*groups: dict[str, Any]) -> Config:
    """A configuration of vLLM groups, each on ports of its own."""
    defaults: dict[str, Any] = {"engine": "vllm", "model": "org/model", "data_parallel_size": 2}
    return Config.model_validate(
        {
            "groups": [
                {
                    **defaults,
                    "name": f"g{n}",
                    "port": 8100 + 10 * n,
                    "data_parallel_rpc_port": 29550 + n,
                    **group,
                }
                for n, group in enumerate(groups)
            ]
        }
    )


def resolved(found: bool | None, *groups: dict[str, Any]) -> Resolved:
    """What becomes of groups whose models' config.json tells `found`."""
    return resolve(config(*groups), lambda _model, _environment: found)


def test_a_mixture_of_experts_stays_one_lock_step_group() -> None:
    result = resolved(True, {})
    (group,) = result.config.groups
    assert isinstance(group, VllmGroup)
    assert (group.name, group.data_parallel_size, group.moe, group.lock_step) == ("g0", 2, True, True)
    assert result.notes == ()


def test_a_dense_model_becomes_replicas_and_one_line_says_so() -> None:
    result = resolved(False, {})
    assert [rank.name for rank in result.config.ranks()] == ["g0-0/0", "g0-1/0"]
    assert [rank.endpoint for rank in result.config.ranks()] == ["127.0.0.1:8100", "127.0.0.1:8101"]
    (note,) = result.notes
    assert note.startswith("group g0: org/model is a dense model")
    assert "2 independent replicas, groups g0-0 to g0-1" in note


def test_what_the_file_says_is_not_looked_up() -> None:
    result = resolve(config({"moe": False}), lambda _model, _environment: pytest.fail("looked up"))
    assert len(result.config.groups) == 2


def test_what_cannot_be_found_out_must_be_said() -> None:
    with pytest.raises(
        Unresolved, match=r"groups\[1\]\.moe: whether org/model .* write moe: true or moe: false"
    ):
        resolved(None, {"moe": True}, {})


def test_what_cannot_be_found_out_is_a_question_to_those_who_can_do_without_the_answer() -> None:
    result = resolve_what_can_be(config({}, {"moe": False}), lambda _model, _environment: None)
    assert [question.field for question in result.open_questions] == ["groups[0].moe"]
    assert [group.name for group in result.config.groups] == ["g0", "g1-0", "g1-1"]


def test_one_rank_alone_is_an_ordinary_server_whatever_the_model() -> None:
    (group,) = resolved(None, {"data_parallel_size": 1}).config.groups
    assert isinstance(group, VllmGroup)
    assert group.moe is False


def test_the_groups_own_environment_says_where_its_model_is() -> None:
    def look(model: str, environment: Mapping[str, str]) -> bool:
        assert (model, environment["HF_HOME"]) == ("/models/x", "/data")
        return True

    resolve(config({"model_path": "/models/x", "env": {"HF_HOME": "/data"}}), look)


def test_a_resolved_configuration_is_resolved_to_itself() -> None:
    first = resolved(False, {}).config
    assert resolve(first, lambda _model, _environment: pytest.fail("looked up")).config == first


def test_replicas_must_not_take_another_groups_name() -> None:
    with pytest.raises(
        Unresolved,
        match=r"^with a group for each replica of dense models, groups\[2\]\.name: 'g0-1' is also that of ",
    ):
        resolved(False, {}, {"name": "g0-1", "data_parallel_size": 1})


def test_other_groups_stay_as_they_are() -> None:
    before = Config.model_validate({"groups": [{"engine": "embedded", "name": "e"}]})
    assert resolve(before).config == before
