"""What the rendered Envoy configuration must say; that Envoy does it is shown by tests/e2e."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config
from gateway.envoy_clusters import RANK_IDLE_TIMEOUT_S
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import EnvoyError, command, locate, validate
from gateway.envoy_types import duration

GROUPS = (
    {"engine": "embedded", "name": "g0", "data_parallel_size": 2},
    {"engine": "adopted", "name": "g1", "model": "m", "endpoints": ["10.0.0.1:8000", "[fd00::1]:8000"]},
)


def rendered(**sections: Any) -> Any:
    """The configuration for two groups of two ranks."""
    return render(Config.model_validate({"groups": GROUPS, **sections}))


def manager(configuration: Any) -> Any:
    """Its HTTP connection manager."""
    listener = configuration["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def route(configuration: Any) -> Any:
    """Its only route."""
    return manager(configuration)["route_config"]["virtual_hosts"][0]["routes"][0]


def cluster(configuration: Any, name: str) -> Any:
    """One of its clusters."""
    return next(one for one in configuration["static_resources"]["clusters"] if one["name"] == name)


def test_ranks_of_all_groups_are_endpoints_that_know_their_names() -> None:
    endpoints = cluster(rendered(), "ranks")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    named = {
        one["metadata"]["filter_metadata"]["envoy.lb"]["rank"]: one["endpoint"]["address"]["socket_address"]
        for one in endpoints
    }
    assert named == {
        "g0/0": {"address": "127.0.0.1", "port_value": 8100},
        "g0/1": {"address": "127.0.0.1", "port_value": 8101},
        "g1/0": {"address": "10.0.0.1", "port_value": 8000},
        "g1/1": {"address": "fd00::1", "port_value": 8000},
    }


def test_streams_have_no_time_limit() -> None:
    configuration = rendered()
    assert route(configuration)["route"]["timeout"] == "0s"
    assert manager(configuration)["stream_idle_timeout"] == "0s"


def test_a_retry_cannot_do_the_same_work_twice() -> None:
    policy = route(rendered(envoy={"retries": 5}))["route"]["retry_policy"]
    assert set(policy["retry_on"].split(",")) == {
        "connect-failure",
        "refused-stream",
        "reset-before-request",
        "retriable-status-codes",
    }
    assert policy["retriable_status_codes"] == [503]
    assert policy["num_retries"] == 5


@pytest.mark.parametrize("name", ["ranks", "ext_proc"])
def test_circuit_breakers_are_as_wide_as_the_configuration_says(name: str) -> None:
    breakers = cluster(rendered(envoy={"max_concurrent_requests": 5000}), name)["circuit_breakers"]
    assert set(breakers["thresholds"][0].values()) == {5000}


def test_envoy_closes_idle_connections_before_vllm_does() -> None:
    vllm_keep_alive_s = 5
    assert vllm_keep_alive_s - RANK_IDLE_TIMEOUT_S > 1


def test_the_body_limit_is_one_number_everywhere() -> None:
    configuration = rendered(envoy={"max_body_bytes": 123_456})
    buffer = manager(configuration)["http_filters"][1]["typed_config"]
    assert route(configuration)["request_body_buffer_limit"] == 123_456
    assert buffer["max_request_bytes"] == 123_456


def test_the_buffer_filter_stands_between_ext_proc_and_router() -> None:
    names = [one["name"] for one in manager(rendered())["http_filters"]]
    assert names == ["envoy.filters.http.ext_proc", "envoy.filters.http.buffer", "envoy.filters.http.router"]


def test_the_ext_proc_service_is_reached_by_tcp_or_by_socket() -> None:
    def address(listen: str) -> Any:
        configuration = rendered(gateway={"ext_proc_listen": listen})
        endpoint = cluster(configuration, "ext_proc")["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
        return endpoint["endpoint"]["address"]

    assert address("127.0.0.1:9002") == {"socket_address": {"address": "127.0.0.1", "port_value": 9002}}
    assert address("unix:/run/x.sock") == {"pipe": {"path": "/run/x.sock"}}


def test_the_yaml_says_what_was_rendered() -> None:
    configuration = rendered()
    assert yaml.safe_load(to_yaml(configuration)) == configuration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (1.0, "1s"), (0.25, "0.25s"), (86_400.0, "86400s"), (1e-6, "0.000001s")],
)
def test_durations_are_written_without_exponents(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_envoy_accepts_the_configuration() -> None:
    validate(locate(None), to_yaml(rendered(gateway={"ext_proc_listen": "unix:/run/x.sock"})))


def test_what_envoy_rejects_is_told_in_its_own_words() -> None:
    configuration = rendered()
    cluster(configuration, "ranks")["conect_timeout"] = "1s"
    with pytest.raises(EnvoyError, match="conect_timeout"):
        validate(locate(None), to_yaml(configuration))


def test_a_configured_envoy_must_be_executable(tmp_path: Path) -> None:
    path = tmp_path / "envoy"
    path.touch()
    with pytest.raises(EnvoyError, match="is not an executable file"):
        locate(path)


def test_several_envoys_can_run_on_one_host() -> None:
    assert "--disable-hot-restart" in command(Path("envoy"), Path("envoy.yaml"))
