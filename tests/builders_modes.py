"""The body modes in which a stream lives as long as its request, and changes of what is rendered for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ext_proc.protocol_names import STREAM_END_METADATA
from gateway.envoy_modes import MODES as RENDERED
from gateway.envoy_modes import EnvoyMode

Change = Callable[[Any], None]
"""Alters Envoy's rendered configuration."""


def no_change(_rendered: Any) -> None:
    """Leave everything as it was rendered."""


@dataclass(frozen=True)
class Mode:
    """One way in which Envoy talks to the ext_proc service."""

    rendered_as: EnvoyMode
    change: Change = no_change
    sees_headers: bool = True

    @property
    def is_full_duplex(self) -> bool:
        return RENDERED[self.rendered_as].request_body == "FULL_DUPLEX_STREAMED"


def listener(rendered: Any) -> Any:
    """The listener that clients connect to."""
    return rendered["static_resources"]["listeners"][0]


def connection_manager(rendered: Any) -> Any:
    """Its HTTP connection manager."""
    return listener(rendered)["filter_chains"][0]["filters"][0]["typed_config"]


def http_filter(rendered: Any, name: str) -> Any:
    """One of the HTTP filters, e.g. "ext_proc"."""
    (found,) = (
        f for f in connection_manager(rendered)["http_filters"] if f["name"] == f"envoy.filters.http.{name}"
    )
    return found["typed_config"]


def route(rendered: Any) -> Any:
    """The only route."""
    return connection_manager(rendered)["route_config"]["virtual_hosts"][0]["routes"][0]


def cluster(rendered: Any, name: str) -> Any:
    """One of the clusters."""
    (found,) = (c for c in rendered["static_resources"]["clusters"] if c["name"] == name)
    return found


def _send_whole_bodies(rendered: Any) -> None:
    """Headers and the whole body in two messages: a mode that others configure, and wavegate does not."""
    ext_proc = http_filter(rendered, "ext_proc")
    ext_proc["processing_mode"]["request_header_mode"] = "SEND"
    ext_proc["processing_mode"]["response_trailer_mode"] = "SEND"
    promise_stream_end(rendered)


def promise_stream_end(rendered: Any) -> None:
    """Say in gRPC metadata that the stream ends with the response, no sooner."""
    name, value = STREAM_END_METADATA
    http_filter(rendered, "ext_proc")["grpc_service"]["initial_metadata"] = [{"key": name, "value": value}]


def accept_trailers(rendered: Any) -> None:
    """Accept trailers on HTTP/1.1, and give up retries: with a retry policy Envoy 1.40 sends a full-duplex
    body that is followed by trailers twice (envoyproxy/envoy#45470)."""
    connection_manager(rendered)["http_protocol_options"] = {"enable_trailers": True}
    del route(rendered)["route"]["retry_policy"]


def leave_out_upstream_log(rendered: Any) -> None:
    """Nothing tells of retries before the response, as with gateways that others configure."""
    del http_filter(rendered, "router")["upstream_log"]


def _end_with_the_request(rendered: Any) -> None:
    """No response phase, and no promise."""
    ext_proc = http_filter(rendered, "ext_proc")
    ext_proc["processing_mode"]["response_trailer_mode"] = "SKIP"
    del ext_proc["grpc_service"]["initial_metadata"]


MODES = {
    **{mode.value: Mode(mode, sees_headers=RENDERED[mode].sends_headers) for mode in EnvoyMode},
    "headers and whole body": Mode(EnvoyMode.ONE_MESSAGE, _send_whole_bodies),
}
"""Modes in which a stream lives as long as its request."""

REQUEST_PHASES_ONLY = Mode(EnvoyMode.ENDPOINT_PICKER_REQUESTS, _end_with_the_request)
"""A gateway that closes its streams before the response."""
