"""What the rendered Envoy configuration must say; that Envoy does it is shown by tests/e2e."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from ext_proc.protocol_names import LB_NAMESPACE, SERVED_KEY, STREAM_END_METADATA
from gateway.config import Config
from gateway.envoy_config import render, to_yaml
from gateway.envoy_modes import EnvoyMode
from gateway.envoy_process import EnvoyError, command, locate, validate
from gateway.envoy_ranks import RANK_IDLE_TIMEOUT_S
from gateway.envoy_types import duration
from tests.builders_modes import cluster, connection_manager, http_filter, listener, route

GROUPS = (
    {"engine": "embedded", "name": "g0", "data_parallel_size": 2},
    {"engine": "adopted", "name": "g1", "model": "m", "endpoints": ["10.0.0.1:8000", "[fd00::1]:8000"]},
)


def rendered(**sections: Any) -> Any:
    """The configuration for two groups of two ranks."""
    return render(Config.model_validate({"groups": GROUPS, **sections}))


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
    assert connection_manager(configuration)["stream_idle_timeout"] == "0s"


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


def test_memory_is_bounded_and_what_costs_least_is_done_first() -> None:
    manager = rendered(envoy={"max_heap_bytes": 1 << 28})["overload_manager"]
    limits = {
        one["name"]: one["typed_config"].get("max_heap_size_bytes") for one in manager["resource_monitors"]
    }
    assert limits["envoy.resource_monitors.fixed_heap"] == 1 << 28
    starts = {
        one["name"].rpartition(".")[2]: trigger.get("threshold", {}).get("value")
        or trigger["scaled"]["scaling_threshold"]
        for one in (*manager["actions"], *manager["loadshed_points"])
        for trigger in one["triggers"]
    }
    assert starts == {
        "shrink_heap": 0.5,
        "stop_accepting_requests": 0.95,
        "reset_high_memory_stream": 0.95,
        "http1_server_abort_dispatch": 1.0,
    }


def test_envoy_closes_idle_connections_before_vllm_does() -> None:
    vllm_keep_alive_s = 5
    assert vllm_keep_alive_s - RANK_IDLE_TIMEOUT_S > 1


def test_the_body_limit_is_one_number_everywhere() -> None:
    configuration = rendered(envoy={"max_body_bytes": 123_456})
    buffer = http_filter(configuration, "buffer")
    assert route(configuration)["request_body_buffer_limit"] == 123_456
    assert buffer["max_request_bytes"] == 123_456


def test_the_buffer_filter_stands_between_ext_proc_and_router() -> None:
    names = [one["name"] for one in connection_manager(rendered())["http_filters"]]
    assert names == ["envoy.filters.http.ext_proc", "envoy.filters.http.buffer", "envoy.filters.http.router"]


@pytest.mark.parametrize("mode", [mode for mode in EnvoyMode if mode != "one_message"])
def test_bodies_are_held_only_where_the_gateway_gets_them_without_the_headers(mode: EnvoyMode) -> None:
    names = [one["name"] for one in connection_manager(rendered(envoy={"mode": mode}))["http_filters"]]
    assert names == ["envoy.filters.http.ext_proc", "envoy.filters.http.router"]


def test_attributes_are_asked_for_only_where_headers_are_not_sent() -> None:
    def attributes(mode: str) -> Any:
        return http_filter(rendered(envoy={"mode": mode}), "ext_proc").get("request_attributes")

    assert attributes("one_message") == [
        "request.path",
        "request.id",
        "request.headers['x-wavegate-priority']",
        "request.headers['x-wavegate-tenant']",
        "request.headers['x-wavegate-explain']",
    ]
    assert attributes("header_only") is None


@pytest.mark.parametrize("mode", EnvoyMode)
def test_the_gateway_is_told_when_streams_end_unless_it_sees_it(mode: EnvoyMode) -> None:
    service = http_filter(rendered(envoy={"mode": mode}), "ext_proc")["grpc_service"]
    told = [(one["key"], one["value"]) for one in service.get("initial_metadata", [])]
    sees_it = mode in ("one_message", "endpoint_picker")
    assert told == ([] if sees_it else [STREAM_END_METADATA])


def test_partial_bodies_have_one_limit_at_listener_and_route() -> None:
    configuration = rendered(envoy={"mode": "partial_body", "partial_body_bytes": 100_000})
    assert listener(configuration)["per_connection_buffer_limit_bytes"] == 100_000
    assert route(configuration)["request_body_buffer_limit"] == 100_000


def test_the_served_endpoint_is_told_where_responses_are_seen() -> None:
    def policy(mode: str) -> Any:
        policies = cluster(rendered(envoy={"mode": mode}), "ranks")["load_balancing_policy"]["policies"]
        return policies[0]["typed_extension_config"]["typed_config"]

    assert policy("endpoint_picker")["selected_host_key"] == {
        "key": LB_NAMESPACE,
        "path": [{"key": SERVED_KEY}],
    }
    assert "selected_host_key" not in policy("one_message")


def test_standby_gateways_come_after_the_gateway_one_by_one() -> None:
    configuration = rendered(envoy={"standby_gateways": ["10.0.0.2:9002", "unix:/run/b.sock"]})
    endpoints = cluster(configuration, "ext_proc")["load_assignment"]["endpoints"]
    assert [
        (one["priority"], *one["lb_endpoints"][0]["endpoint"]["address"].values()) for one in endpoints
    ] == [
        (0, {"address": "127.0.0.1", "port_value": 9002}),
        (1, {"address": "10.0.0.2", "port_value": 9002}),
        (2, {"path": "/run/b.sock"}),
    ]


class TestTlsToTheGateway:
    """Field by field; that Envoy and gateway then understand each other is shown by tests/e2e."""

    GATEWAY: ClassVar[dict[str, Any]] = {"ext_proc_tls": {"cert": "/g/cert.pem", "key": "/g/key.pem"}}

    def context(self, **sections: Any) -> Any:
        """The TLS context of the ext_proc cluster."""
        socket = cluster(rendered(**sections), "ext_proc")["transport_socket"]
        return socket["typed_config"]["common_tls_context"]

    def test_plain_text_is_the_default(self) -> None:
        assert "transport_socket" not in cluster(rendered(), "ext_proc")

    def test_the_gateways_certificate_is_trusted_by_default_and_http2_is_offered(self) -> None:
        assert self.context(gateway=self.GATEWAY) == {
            "alpn_protocols": ["h2"],
            "validation_context": {"trusted_ca": {"filename": "/g/cert.pem"}},
        }

    def test_an_authority_signs_for_names(self) -> None:
        tls = {"ca": "/e/ca.pem", "server_names": ["gateway.example", "10.0.0.2"]}
        assert self.context(gateway=self.GATEWAY, envoy={"ext_proc_tls": tls})["validation_context"] == {
            "trusted_ca": {"filename": "/e/ca.pem"},
            "match_typed_subject_alt_names": [
                {"san_type": "DNS", "matcher": {"exact": "gateway.example"}},
                {"san_type": "IP_ADDRESS", "matcher": {"exact": "10.0.0.2"}},
            ],
        }

    def test_envoy_shows_its_own_certificate_to_those_who_ask(self) -> None:
        tls = {"cert": "/e/cert.pem", "key": "/e/key.pem"}
        assert self.context(gateway=self.GATEWAY, envoy={"ext_proc_tls": tls})["tls_certificates"] == [
            {"certificate_chain": {"filename": "/e/cert.pem"}, "private_key": {"filename": "/e/key.pem"}}
        ]


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


@pytest.mark.parametrize("mode", EnvoyMode)
def test_envoy_accepts_the_configuration(mode: EnvoyMode) -> None:
    standby = ["unix:/run/y.sock"]
    envoy = {"mode": mode, "standby_gateways": standby}
    validate(locate(None), to_yaml(rendered(envoy=envoy, gateway={"ext_proc_listen": "unix:/run/x.sock"})))


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


def test_headers_that_the_configuration_names_are_asked_for_and_passed_on() -> None:
    gateway = {
        "admission": {"tenant_header": "x-team"},
        "sessions": {"header": "x-chat"},
        "explain_to_clients": False,
    }
    configuration = rendered(gateway=gateway)
    assert http_filter(configuration, "ext_proc")["request_attributes"] == [
        "request.path",
        "request.id",
        "request.headers['x-wavegate-priority']",
        "request.headers['x-team']",
        "request.headers['x-chat']",
    ]
    removed = route(configuration)["request_headers_to_remove"]
    assert {"x-wavegate-priority", "x-wavegate-tenant", "x-wavegate-explain"} <= set(removed)
    assert not {"x-team", "x-chat"} & set(removed)
