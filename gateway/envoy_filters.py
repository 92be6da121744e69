"""Renders the HTTP filters: ext_proc in the configured mode, what it needs after it, the router.

Must never decide what a mode is made of: `envoy_modes` does.
"""

from __future__ import annotations

from ext_proc.protocol_names import DECISION_NAMESPACE, LB_NAMESPACE, STREAM_END_METADATA, SUBSET_NAMESPACE
from ext_proc.request_head import HeadNames, request_attributes
from gateway.config_envoy import EnvoySection
from gateway.envoy_gateways import EXT_PROC_CLUSTER
from gateway.envoy_logs import upstream_logs
from gateway.envoy_modes import MODES, ModeTraits
from gateway.envoy_types import Json, duration, typed

_FILTERS = "envoy.filters.http"
_TYPES = "envoy.extensions.filters.http"


def http_filters(envoy: EnvoySection, names: HeadNames) -> list[Json]:
    """The filters in the order in which requests pass them."""
    return [*filters_before_the_router(envoy, names), _router_filter()]


def filters_before_the_router(envoy: EnvoySection, names: HeadNames) -> list[Json]:
    """Those that have the gateway asked."""
    mode = MODES[envoy.mode]
    buffer = [_buffer_filter(envoy)] if mode.holds_headers else []
    return [_ext_proc_filter(envoy, mode, names), *buffer]


def _ext_proc_filter(envoy: EnvoySection, mode: ModeTraits, names: HeadNames) -> dict[str, Json]:
    return {
        "name": f"{_FILTERS}.ext_proc",
        "typed_config": typed(
            f"{_TYPES}.ext_proc.v3.ExternalProcessor",
            grpc_service=_grpc_service(mode),
            # Without the gateway requests are balanced by the ranks cluster's fallback policy.
            failure_mode_allow=True,
            message_timeout=duration(envoy.message_timeout_s),
            processing_mode=_processing_mode(mode),
            **_head_of_request(mode, names),
            metadata_options=_metadata_options(mode),
        ),
    }


def _grpc_service(mode: ModeTraits) -> dict[str, Json]:
    service: dict[str, Json] = {"envoy_grpc": {"cluster_name": EXT_PROC_CLUSTER}}
    if mode.promises_stream_end:
        name, value = STREAM_END_METADATA
        service["initial_metadata"] = [{"key": name, "value": value}]
    return service


def _processing_mode(mode: ModeTraits) -> dict[str, Json]:
    return {
        "request_header_mode": mode.request_header,
        "request_body_mode": mode.request_body,
        "request_trailer_mode": mode.request_trailer,
        "response_header_mode": mode.response_header,
        "response_body_mode": mode.response_body,
        "response_trailer_mode": mode.response_trailer,
    }


def _head_of_request(mode: ModeTraits, names: HeadNames) -> dict[str, Json]:
    """Where headers are not sent: what of them comes with the body."""
    return {} if mode.sends_headers else {"request_attributes": list(request_attributes(names))}


def _metadata_options(mode: ModeTraits) -> dict[str, Json]:
    """Dynamic metadata that the gateway may set (the pick, and its reasons), and that it gets to see."""
    options: dict[str, Json] = {"receiving_namespaces": {"untyped": [LB_NAMESPACE, DECISION_NAMESPACE]}}
    if mode.sees_responses:
        options["forwarding_namespaces"] = {"untyped": [LB_NAMESPACE, SUBSET_NAMESPACE]}
    return options


def _buffer_filter(envoy: EnvoySection) -> dict[str, Json]:
    """Holds the headers until the body is complete: the router then chooses after ext_proc has answered."""
    return {
        "name": f"{_FILTERS}.buffer",
        "typed_config": typed(f"{_TYPES}.buffer.v3.Buffer", max_request_bytes=envoy.max_body_bytes),
    }


def _router_filter() -> dict[str, Json]:
    return {
        "name": f"{_FILTERS}.router",
        "typed_config": typed(f"{_TYPES}.router.v3.Router", **router_settings()),
    }


def router_settings() -> dict[str, Json]:
    """Fields of the router filter."""
    return {"suppress_envoy_headers": True, **upstream_logs()}
