"""The vocabulary of the endpoint-picker protocol's cases, in whole protobuf messages.

`REQ`, `GET` and `RESPONSE` are what a gateway sends, `ROUTE` and `REJECT` what it must get back. Replies are
built here by hand, not by the code under test. `canonical` takes out what is no part of the protocol.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

from ext_proc.ledger import Ledger
from ext_proc.vocabulary import Rank
from tests.builders import pool, report

A = Rank("a", 0, "10.0.0.1:8000")
B = Rank("b", 0, "10.0.0.1:8001")
C = Rank("c", 0, "10.0.0.2:8000")

BODY = b'{"model":"m","prompt":"p","max_tokens":8}'
PATH = "/v1/completions"
REQUEST_ID = "id-1"

Messages = list[ProcessingRequest]
Replies = list[ProcessingResponse]


def waiting(**requests: int) -> Ledger:
    """A pool of the ranks named, each reporting so many waiting requests: `waiting(A=3, B=0)`."""
    ranks = {"A": A, "B": B, "C": C}
    ledger = pool([ranks[name] for name in requests])
    for name, count in requests.items():
        ledger.record_report(ranks[name], report(time.monotonic(), waiting=count))
    return ledger


# --- What a gateway sends ------------------------------------------------------------------------------


def REQ(
    *chunks: bytes,
    path: str = PATH,
    headers: Sequence[tuple[str, str]] = (),
    request_id: str | None = REQUEST_ID,
    trailers: bool = False,
    hint: Any = None,
) -> Messages:
    """A POST: headers, then the body in these chunks (by default `BODY`), the last with end of stream.

    `trailers`: no chunk has it, trailers follow. `hint`: the subset hint on the headers.
    """
    named = [(":method", "POST"), (":path", path), *headers]
    if request_id is not None:
        named.append(("x-request-id", request_id))
    first = ProcessingRequest(request_headers=HttpHeaders())
    add_headers(first, named)
    messages = [with_hint(first, hint) if hint is not None else first]
    pieces = chunks or (BODY,)
    for index, chunk in enumerate(pieces):
        ends = index == len(pieces) - 1 and not trailers
        messages.append(ProcessingRequest(request_body=HttpBody(body=chunk, end_of_stream=ends)))
    if trailers:
        messages.append(ProcessingRequest(request_trailers=HttpTrailers()))
    return messages


def GET(path: str = "/v1/models", *, headers: Sequence[tuple[str, str]] = (), hint: Any = None) -> Messages:
    """A request without a body."""
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True))
    add_headers(message, [(":method", "GET"), (":path", path), ("x-request-id", REQUEST_ID), *headers])
    return [with_hint(message, hint) if hint is not None else message]


def RESPONSE(
    *chunks: bytes,
    status: int = 200,
    served: str | None = None,
    trailers: bool = False,
    headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),),
) -> Messages:
    """A response: headers, then these chunks, the last with end of stream; none: it is on the headers."""
    first = ProcessingRequest(response_headers=HttpHeaders(end_of_stream=not chunks and not trailers))
    add_headers(first, [(":status", str(status)), *headers])
    if served is not None:
        namespace = first.metadata_context.filter_metadata["envoy.lb"]
        namespace.update({"x-gateway-destination-endpoint-served": served})
    messages = [first]
    for index, chunk in enumerate(chunks):
        ends = index == len(chunks) - 1 and not trailers
        messages.append(ProcessingRequest(response_body=HttpBody(body=chunk, end_of_stream=ends)))
    if trailers:
        messages.append(ProcessingRequest(response_trailers=HttpTrailers()))
    return messages


def add_headers(message: ProcessingRequest, headers: Iterable[tuple[str, str]]) -> None:
    """Put headers into a headers message, in `raw_value` as gateways do."""
    field = getattr(message, message.WhichOneof("request"))
    for name, value in headers:
        header = field.headers.headers.add()
        header.key, header.raw_value = name, value.encode()


def with_hint(message: ProcessingRequest, hint: Any) -> ProcessingRequest:
    """The message with a subset hint."""
    namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    namespace.update({"x-gateway-destination-endpoint-subset": hint})
    return message


def in_modes(messages: Messages, *, request: str, response: str = "NONE") -> Messages:
    """The messages with body modes stated on the first, as Envoy does."""
    messages[0].protocol_config.request_body_mode = ProcessingMode.BodySendMode.Value(request)
    messages[0].protocol_config.response_body_mode = ProcessingMode.BodySendMode.Value(response)
    return messages


# --- What it must get back -----------------------------------------------------------------------------


def ROUTE(
    *ranks: Rank,
    body: bytes = BODY,
    trailers: bool = False,
    new_request_id: str | None = None,
    removed: Sequence[str] = (),
) -> Replies:
    """The request goes to the first of `ranks`: headers, the body in pieces, end of stream on the last."""
    set_headers = {} if trailers else {"content-length": str(len(body))}
    if new_request_id is not None:
        set_headers["x-request-id"] = new_request_id
    replies = [*ROUTE_HEADERS(*ranks, set_headers=set_headers, removed=removed)]
    pieces = [body[start : start + 62_000] for start in range(0, len(body), 62_000)] or [b""]
    replies += PIECES("request_body", *pieces, ends=not trailers)
    if trailers:
        replies.append(ProcessingResponse(request_trailers=TrailersResponse()))
    return replies


def ROUTE_HEADERS(
    *ranks: Rank, set_headers: Mapping[str, str] | None = None, removed: Sequence[str] = ()
) -> Replies:
    """The reply to headers that routes: header and dynamic metadata say the same."""
    destination = ",".join(rank.endpoint for rank in ranks)
    reply = ProcessingResponse(request_headers=HeadersResponse())
    reply.request_headers.response.clear_route_cache = True
    overwrite(reply, {"x-gateway-destination-endpoint": destination, **(set_headers or {})})
    reply.request_headers.response.header_mutation.remove_headers.extend(removed)
    reply.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": destination}})
    return [reply]


def overwrite(reply: ProcessingResponse, headers: Mapping[str, str]) -> None:
    """Let a reply set headers in place of all values they have."""
    mutation = getattr(reply, reply.WhichOneof("response")).response.header_mutation
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = name, value.encode()
        option.append_action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def PIECES(kind: str, *pieces: bytes, ends: bool = True) -> Replies:
    """A body passed on in these pieces, the last with end of stream."""
    replies = []
    for index, piece in enumerate(pieces):
        reply = ProcessingResponse(**{kind: BodyResponse()})
        streamed = getattr(reply, kind).response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = piece, ends and index == len(pieces) - 1
        replies.append(reply)
    return replies


def PASSED_RESPONSE(*pieces: bytes, trailers: bool = False) -> Replies:
    """A response passed on: headers, these pieces, trailers."""
    replies = [ProcessingResponse(response_headers=HeadersResponse())]
    if pieces:
        replies += PIECES("response_body", *pieces, ends=not trailers)
    if trailers:
        replies.append(ProcessingResponse(response_trailers=TrailersResponse()))
    return replies


def REJECT(status: int) -> Replies:
    """One answer of the gateway's own; `canonical` takes the texts out of it."""
    reply = ProcessingResponse(immediate_response=ImmediateResponse())
    reply.immediate_response.status.code = status
    return [reply]


def canonical(replies: Iterable[ProcessingResponse]) -> Replies:
    """The replies with headers in alphabetical order, and refusals without their texts."""
    ordered = []
    for original in replies:
        reply = ProcessingResponse()
        reply.CopyFrom(original)
        kind = reply.WhichOneof("response")
        if kind == "immediate_response":
            error = json.loads(reply.immediate_response.body)["error"]
            assert error["message"]
            assert error["type"]
            for field in ("body", "headers", "details"):
                reply.immediate_response.ClearField(field)
        elif kind in ("request_headers", "response_headers"):
            mutation = getattr(reply, kind).response.header_mutation
            mutation.set_headers.sort(key=lambda option: option.header.key)
            mutation.remove_headers.sort()
        ordered.append(reply)
    return ordered
