"""Builds and reads ext_proc protobuf messages, so that no other module touches their fields.

Protocol: envoy/service/ext_proc/v3/external_processor.proto of Envoy 1.40.
"""

from __future__ import annotations

from functools import lru_cache

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

LB_METADATA_NAMESPACE = "envoy.lb"
"""Namespace of the dynamic metadata that Envoy's override_host policy reads."""
DESTINATION_KEY = "x-gateway-destination-endpoint"
"""Key of the picked endpoints: the endpoint-picker protocol's name for them."""

_FILTER_NAME = "envoy.filters.http.ext_proc"

_PASSED: dict[str, bytes] = {
    "request_headers": ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),
    "request_body": ProcessingResponse(request_body=BodyResponse()).SerializeToString(),
    "request_trailers": ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString(),
    "response_headers": ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
    "response_body": ProcessingResponse(response_body=BodyResponse()).SerializeToString(),
    "response_trailers": ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString(),
}


def attribute(message: ProcessingRequest, name: str) -> str:
    """A request attribute (Envoy's `request_attributes`) as text; empty when it was not sent."""
    attributes = message.attributes
    if _FILTER_NAME not in attributes:
        return ""
    fields = attributes[_FILTER_NAME].fields
    value: str = fields[name].string_value if name in fields else ""
    return value


def passed(message: ProcessingRequest) -> bytes:
    """The reply that lets `message` through unchanged."""
    return _PASSED[message.WhichOneof("request")]


@lru_cache(maxsize=4096)
def routed(endpoints: tuple[str, ...]) -> bytes:
    """The reply to a whole request body that sends it to the first of `endpoints`, the rest for retries."""
    reply = ProcessingResponse(request_body=BodyResponse())
    namespace = reply.dynamic_metadata.fields[LB_METADATA_NAMESPACE].struct_value
    namespace.fields[DESTINATION_KEY].string_value = ",".join(endpoints)
    serialized: bytes = reply.SerializeToString()
    return serialized
