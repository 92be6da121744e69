"""What a configuration may say, and what `Config` makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.config import Config
from gateway.config_types import endpoint, split_endpoint


def config(*groups: dict[str, Any], **sections: Any) -> Config:
    """A configuration of these groups."""
    return Config.model_validate({"groups": groups, **sections})


def embedded(name: str = "g0", **fields: Any) -> dict[str, Any]:
    """An embedded group."""
    return {"engine": "embedded", "name": name, **fields}


def adopted(*endpoints: str, name: str = "a0") -> dict[str, Any]:
    """An adopted group."""
    return {"engine": "adopted", "name": name, "model": "m", "endpoints": endpoints}


def reasons(*groups: dict[str, Any], **sections: Any) -> str:
    """Why a configuration is refused."""
    with pytest.raises(ValidationError) as refused:
        config(*groups, **sections)
    return str(refused.value)


def test_ranks_of_an_embedded_group_listen_on_consecutive_ports() -> None:
    ranks = config(embedded(data_parallel_size=3, port=9500)).ranks()
    assert [(rank.name, rank.endpoint) for rank in ranks] == [
        ("g0/0", "127.0.0.1:9500"),
        ("g0/1", "127.0.0.1:9501"),
        ("g0/2", "127.0.0.1:9502"),
    ]


def test_ranks_of_all_groups_come_in_the_order_of_the_file() -> None:
    ranks = config(adopted("10.0.0.2:1", "10.0.0.1:1", name="b"), embedded("a")).ranks()
    assert [rank.name for rank in ranks] == ["b/0", "b/1", "a/0"]


def test_ipv6_endpoints_are_spelled_in_one_way() -> None:
    ranks = config(adopted("[FD00:0::1]:8000")).ranks()
    assert [rank.endpoint for rank in ranks] == ["[fd00::1]:8000"]


def test_numbers_among_rank_options_are_taken_as_text() -> None:
    loaded = config(embedded(args=["--max-num-seqs", 64, "--slowdown", 1.5]))
    group = loaded.groups[0]
    assert group.engine == "embedded"
    assert group.args == ("--max-num-seqs", "64", "--slowdown", "1.5")


def test_a_host_name_is_no_address_of_a_rank() -> None:
    assert "'localhost' is not an IP address" in reasons(adopted("localhost:8000"))


def test_a_wildcard_is_no_address_of_a_rank() -> None:
    assert "names no machine" in reasons(embedded(host="0.0.0.0"))
    assert "names no machine" in reasons(adopted("0.0.0.0:8000"))


def test_ports_of_a_group_must_fit() -> None:
    assert "above 65535" in reasons(embedded(port=65530, data_parallel_size=7))


def test_options_for_a_rank_that_does_not_exist_are_refused() -> None:
    assert "ranks are 0 to 1" in reasons(embedded(data_parallel_size=2, rank_args={2: ["--slowdown", "8"]}))


def test_options_of_ranks_that_wavegate_itself_gives_are_refused() -> None:
    assert "gives the ranks --port; write port: … instead" in reasons(embedded(args=["--port", 1]))
    assert config(embedded(args=["--kv-events-config", "{}"]))


def test_groups_need_names_of_their_own() -> None:
    assert "groups[1].name: 'g0' is also that of groups[0]" in reasons(embedded(), embedded(port=9500))


def test_two_adopted_ranks_cannot_share_an_address() -> None:
    assert "groups[1].endpoints: 10.0.0.1:1 of rank b/0 is also that of rank a/0" in reasons(
        adopted("10.0.0.1:1", name="a"), adopted("10.0.0.1:1", name="b")
    )


@pytest.mark.parametrize(
    ("sections", "fields"),
    [
        ({"envoy": {"port": 8101}}, ("groups[0].port", "envoy.port")),
        ({"envoy": {"admin_port": 9090}}, ("gateway.admin_port", "envoy.admin_port")),
        ({"gateway": {"ext_proc_listen": "127.0.0.1:8080"}}, ("gateway.ext_proc_listen", "envoy.port")),
        ({"envoy": {"port": 29550}}, ("groups[0].data_parallel_rpc_port", "envoy.port")),
        ({"envoy": {"host": "0.0.0.0", "port": 8100}}, ("groups[0].port", "envoy.port")),
    ],
)
def test_two_processes_cannot_listen_on_one_port(sections: dict[str, Any], fields: tuple[str, str]) -> None:
    message = reasons(embedded(data_parallel_size=2), **sections)
    assert all(field in message for field in fields)


def test_the_same_port_on_two_addresses_is_fine() -> None:
    assert config(embedded(), envoy={"host": "127.0.0.2", "port": 8100})


def test_a_group_of_one_has_no_handshake_port() -> None:
    assert config(embedded("a"), embedded("b", port=8200))
    both = (embedded("a", data_parallel_size=2), embedded("b", data_parallel_size=2, port=8200))
    assert "groups[1].data_parallel_rpc_port" in reasons(*both)


def test_an_ext_proc_socket_takes_no_port() -> None:
    loaded = config(embedded(), gateway={"ext_proc_listen": "unix:/run/wavegate/ext_proc.sock"})
    assert "gateway.ext_proc_listen" not in [listener.field for listener in loaded.listeners()]


def test_a_socket_path_longer_than_the_system_allows_is_refused() -> None:
    assert "107 bytes" in reasons(embedded(), gateway={"ext_proc_listen": f"unix:/{'x' * 107}"})


def test_what_was_loaded_can_be_written_and_loaded_again() -> None:
    first = config(
        embedded(data_parallel_size=2, args=["--a", 1], rank_args={1: ["--b"]}),
        adopted("[fd00::1]:8000"),
        gateway={"ext_proc_listen": "unix:/tmp/x.sock"},
    )
    written = yaml.safe_dump(first.model_dump(mode="json", by_alias=True))
    assert Config.model_validate(yaml.safe_load(written)) == first


def host_and_port_or_reason(text: str) -> tuple[str, int] | str:
    """What `split_endpoint` makes of any text."""
    try:
        return split_endpoint(text)
    except ValueError as error:
        return str(error)


@given(st.text(max_size=40) | st.from_regex(r"\[?[0-9a-f.:]{1,20}\]?:[0-9]{1,6}", fullmatch=True))
def test_any_text_is_an_endpoint_or_refused_with_a_reason(text: str) -> None:
    result = host_and_port_or_reason(text)
    if isinstance(result, str):
        assert "is not ip:port" in result or "is not an IP address" in result
    else:
        assert split_endpoint(endpoint(*result)) == result


TLS = {"cert": "/cert.pem", "key": "/key.pem"}


def test_envoy_needs_no_settings_to_trust_the_gateways_certificate() -> None:
    assert config(embedded(), gateway={"ext_proc_tls": TLS}).envoy.ext_proc_tls is None


@pytest.mark.parametrize(
    ("envoy", "gateway", "expected"),
    [
        ({"ext_proc_tls": {}}, {}, "gateway.ext_proc_tls is not set"),
        ({}, {"ext_proc_tls": {**TLS, "client_ca": "/ca.pem"}}, "envoy.ext_proc_tls.cert: is needed"),
        ({"ext_proc_tls": {"ca": "/ca.pem"}}, {"ext_proc_tls": TLS}, "ca and server_names go together"),
        ({"ext_proc_tls": {"server_names": ["a"]}}, {"ext_proc_tls": TLS}, "ca and server_names go together"),
        ({"ext_proc_tls": {"key": "/key.pem"}}, {"ext_proc_tls": TLS}, "cert and key go together"),
    ],
)
def test_tls_between_envoy_and_gateway_is_set_on_both_sides(
    envoy: dict[str, Any], gateway: dict[str, Any], expected: str
) -> None:
    assert expected in reasons(embedded(), envoy=envoy, gateway=gateway)


@pytest.mark.parametrize("standby", [["127.0.0.1:9002"], ["10.0.0.2:9002", "10.0.0.2:9002"]])
def test_no_gateway_stands_by_for_itself(standby: list[str]) -> None:
    assert "is a gateway of this file already" in reasons(embedded(), envoy={"standby_gateways": standby})


def test_a_standby_gateway_is_an_address_that_envoy_can_send_to() -> None:
    assert "names no machine" in reasons(embedded(), envoy={"standby_gateways": ["0.0.0.0:9002"]})


def test_sessions_need_a_policy_that_tells_how_much_worse_a_rank_is() -> None:
    assert config(embedded(), gateway={"sessions": {"header": "x-chat"}})
    refused = reasons(embedded(), gateway={"policy": "least_request", "sessions": {"header": "x-chat"}})
    assert "sessions.header: the policy least_request does not tell" in refused


def test_so_does_a_bound_for_adapters() -> None:
    for bound_ms, policy in ((300, "lockstep"), (500, "least_request")):  # 500 is the default, written out
        assert config(embedded(), gateway={"policy": policy, "adapters": {"bound_ms": bound_ms}})
    refused = reasons(embedded(), gateway={"policy": "least_request", "adapters": {"bound_ms": 300}})
    assert "adapters.bound_ms: the policy least_request does not tell" in refused


@pytest.mark.parametrize("header", ["X-Tenant", "x tenant", "", "x'] || true", "x" * 65])
def test_a_headers_name_is_written_in_lower_case(header: str) -> None:
    assert "is not a header's name" in reasons(embedded(), gateway={"admission": {"tenant_header": header}})
