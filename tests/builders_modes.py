"""The rendered configuration of Envoy in other ext_proc body modes: what each needs, and nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ext_proc.protocol_names import STREAM_END_METADATA
from gateway.envoy_types import typed

SKIP, SEND = "SKIP", "SEND"
FULL_DUPLEX = "FULL_DUPLEX_STREAMED"


@dataclass(frozen=True)
class Mode:
    """One way in which Envoy talks to the ext_proc service."""

    request_header: str
    request_body: str
    request_trailer: str = SKIP
    response_header: str = SKIP
    response_body: str = "NONE"
    response_trailer: str = SKIP
    buffer_filter: bool = False
    """A filter after ext_proc that holds the headers until the body is complete."""
    body_buffer_limit_bytes: int | None = None
    """What Envoy buffers of a body, where another than the largest body. Listener and route must agree: with
    64 KiB on the route and 1 MiB on the listener, the end of one in five bodies of 2 MB was lost."""
    promises_stream_end: bool = False
    """Say in gRPC metadata that the stream ends with the response, no sooner."""
    forwards: tuple[str, ...] = ()
    """Metadata namespaces that the service gets to see."""
    accepts_trailers: bool = False
    """Accept trailers on HTTP/1.1, and give up retries: with a retry policy Envoy 1.40 sends a full-duplex
    body that is followed by trailers twice (envoyproxy/envoy#45470)."""

    tls: Mapping[str, Any] | None = None
    """TLS of the ext_proc cluster: fields of Envoy's CommonTlsContext."""

    @property
    def sees_headers(self) -> bool:
        return self.request_header == SEND

    @property
    def is_full_duplex(self) -> bool:
        return self.request_body == FULL_DUPLEX

    def apply(self, rendered: Any) -> None:
        """Put Envoy's rendered configuration into this mode."""
        (listener,) = rendered["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        ext_proc = next(f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.ext_proc")
        if not self.buffer_filter:
            manager["http_filters"] = [
                f for f in manager["http_filters"] if f["name"] != "envoy.filters.http.buffer"
            ]
        settings = ext_proc["typed_config"]
        settings["processing_mode"] = {
            "request_header_mode": self.request_header,
            "request_body_mode": self.request_body,
            "request_trailer_mode": self.request_trailer,
            "response_header_mode": self.response_header,
            "response_body_mode": self.response_body,
            "response_trailer_mode": self.response_trailer,
        }
        if self.promises_stream_end:
            name, value = STREAM_END_METADATA
            settings["grpc_service"]["initial_metadata"] = [{"key": name, "value": value}]
        if self.forwards:
            settings["metadata_options"]["forwarding_namespaces"] = {"untyped": list(self.forwards)}
        (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
        if self.accepts_trailers:
            manager["http_protocol_options"] = {"enable_trailers": True}
            del route["route"]["retry_policy"]
        if self.body_buffer_limit_bytes is not None:
            route["request_body_buffer_limit"] = self.body_buffer_limit_bytes
            listener["per_connection_buffer_limit_bytes"] = self.body_buffer_limit_bytes
        if self.tls is not None:
            rendered["static_resources"]["clusters"][1]["transport_socket"] = {
                "name": "envoy.transport_sockets.tls",
                "typed_config": typed(
                    "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                    common_tls_context=self.tls,
                ),
            }
        if self.response_header == SEND:
            ranks = rendered["static_resources"]["clusters"][0]
            policy = ranks["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
            policy["selected_host_key"] = {
                "key": "envoy.lb",
                "path": [{"key": "x-gateway-destination-endpoint-served"}],
            }


MODES = {
    "one message": Mode(SKIP, "BUFFERED", buffer_filter=True),
    "header-only": Mode(SEND, "NONE", response_trailer=SEND, promises_stream_end=True),
    "buffered": Mode(SEND, "BUFFERED", response_trailer=SEND, promises_stream_end=True),
    "partial": Mode(
        SEND,
        "BUFFERED_PARTIAL",
        response_trailer=SEND,
        body_buffer_limit_bytes=65_536,
        promises_stream_end=True,
    ),
    "endpoint picker": Mode(
        SEND,
        FULL_DUPLEX,
        request_trailer=SEND,
        response_header=SEND,
        response_body=FULL_DUPLEX,
        response_trailer=SEND,
        forwards=("envoy.lb", "envoy.lb.subset_hint"),
    ),
    "endpoint picker that does not see responses": Mode(
        SEND, FULL_DUPLEX, request_trailer=SEND, response_trailer=SEND, promises_stream_end=True
    ),
}
"""Modes in which a stream lives as long as its request."""

REQUEST_PHASES_ONLY = Mode(SEND, FULL_DUPLEX, request_trailer=SEND)
"""A gateway that closes its streams before the response."""
