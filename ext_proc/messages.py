"""Builds the replies of ext_proc, so that no other module touches their fields.

Protocol: envoy/service/ext_proc/v3/external_processor.proto of Envoy 1.40, and the endpoint-picker protocol
1.0.0 of gateway-api-inference-extension. Replies are serialised here; they are functions of their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingResponse,
    TrailersResponse,
)

from ext_proc.protocol_names import DECISION_KEY, DECISION_NAMESPACE, DESTINATION, LB_NAMESPACE

MAX_CHUNK_BYTES = 62_000
"""Largest piece of a streamed body: some Envoys take no more than 64 KiB."""

_OVERWRITE: int = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

_PASSED: dict[str, bytes] = {
    "request_headers": ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),
    "request_body": ProcessingResponse(request_body=BodyResponse()).SerializeToString(),
    "request_trailers": ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString(),
    "response_headers": ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
    "response_body": ProcessingResponse(response_body=BodyResponse()).SerializeToString(),
    "response_trailers": ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString(),
}


def passed(kind: str) -> bytes:
    """The reply that lets a message of this kind through unchanged."""
    return _PASSED[kind]


@lru_cache(maxsize=4096)
def routed(endpoints: tuple[str, ...]) -> bytes:
    """The reply to a request body that sends it to the first of `endpoints`, the rest for retries.

    By dynamic metadata alone: the headers have been let through already.
    """
    reply = ProcessingResponse(request_body=BodyResponse())
    _put_destination(reply, endpoints)
    return _serialized(reply)


def explained(reply: bytes, decision: str) -> bytes:
    """A reply that routes a request, with the decision in words as further dynamic metadata."""
    message = ProcessingResponse.FromString(reply)
    namespace = message.dynamic_metadata.fields[DECISION_NAMESPACE].struct_value
    namespace.fields[DECISION_KEY].string_value = decision
    return _serialized(message)


@lru_cache(maxsize=4096)
def routed_with_header(endpoints: tuple[str, ...]) -> bytes:
    """The same while Envoy still holds the headers: by header and by dynamic metadata."""
    reply = ProcessingResponse(request_body=BodyResponse())
    common = reply.request_body.response
    common.clear_route_cache = True
    _set(common.header_mutation, {DESTINATION: ",".join(endpoints)})
    _put_destination(reply, endpoints)
    return _serialized(reply)


@lru_cache(maxsize=4096)
def routed_by_trailers(endpoints: tuple[str, ...]) -> bytes:
    """The reply to the trailers of a request without body that sends it to `endpoints`."""
    reply = ProcessingResponse(request_trailers=TrailersResponse())
    _put_destination(reply, endpoints)
    return _serialized(reply)


def headers_routed(
    endpoints: Sequence[str], *, overwrite: Mapping[str, str], remove: Sequence[str] = ()
) -> bytes:
    """The reply to request headers that sends the request to `endpoints`, by header and dynamic metadata."""
    reply = ProcessingResponse(request_headers=HeadersResponse())
    common = reply.request_headers.response
    common.clear_route_cache = True
    _set(common.header_mutation, {DESTINATION: ",".join(endpoints), **overwrite})
    common.header_mutation.remove_headers.extend(remove)
    _put_destination(reply, endpoints)
    return _serialized(reply)


def headers_changed(kind: str, *, overwrite: Mapping[str, str], remove: Sequence[str] = ()) -> bytes:
    """The reply to request or response headers (`kind`) that changes them and decides nothing."""
    if not overwrite and not remove:
        return passed(kind)
    reply = ProcessingResponse(**{kind: HeadersResponse()})
    mutation = getattr(reply, kind).response.header_mutation
    _set(mutation, overwrite)
    mutation.remove_headers.extend(remove)
    return _serialized(reply)


def streamed(kind: str, body: bytes, *, end_of_stream: bool) -> Iterator[bytes]:
    """The replies that pass `body` on as a part of the request or response body (`kind`), in pieces.

    An empty body is one empty piece.
    """
    for start in range(0, max(len(body), 1), MAX_CHUNK_BYTES):
        reply = ProcessingResponse(**{kind: BodyResponse()})
        piece = getattr(reply, kind).response.body_mutation.streamed_response
        piece.body = body[start : start + MAX_CHUNK_BYTES]
        piece.end_of_stream = end_of_stream and start + MAX_CHUNK_BYTES >= len(body)
        yield _serialized(reply)


def answered(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """The reply that ends the exchange with an answer of our own; `details` go to access logs."""
    reply = ProcessingResponse(immediate_response=ImmediateResponse(body=body, details=details))
    reply.immediate_response.status.code = status
    _set(reply.immediate_response.headers, headers)
    return _serialized(reply)


def _set(mutation: HeaderMutation, headers: Mapping[str, str]) -> None:
    """Set headers in place of all values they have. Values go in `raw_value` only, as Envoy demands."""
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = _OVERWRITE


def _put_destination(reply: ProcessingResponse, endpoints: Sequence[str]) -> None:
    namespace = reply.dynamic_metadata.fields[LB_NAMESPACE].struct_value
    namespace.fields[DESTINATION].string_value = ",".join(endpoints)


def _serialized(reply: ProcessingResponse) -> bytes:
    serialized: bytes = reply.SerializeToString()
    return serialized
