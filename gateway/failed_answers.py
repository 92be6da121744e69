"""Hears from Envoy which answers of ranks failed: the receiving end of an access log that has only these.

In the cheapest mode of ext_proc no response passes through the gateway, so this is how it learns, at once,
that a rank answers with errors: one that drains does so, with `/health` 200. Must never judge a rank by that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import grpc
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from gateway.config_types import endpoint

SERVICE_NAME = "envoy.service.accesslog.v3.AccessLogService"

OnFailure = Callable[[str, int], None]
"""Told `ip:port` of a rank and the HTTP status of an answer it gave."""

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def failed_answers_handler(on_failure: OnFailure) -> grpc.GenericRpcHandler:
    """The gRPC service that Envoy's access log streams to."""

    async def receive(messages: AsyncIterator[bytes], _context: _Context) -> bytes:
        async for message in messages:
            for address, status in read_entries(message):
                on_failure(address, status)
            # Envoy would keep the stream, even one to a standby gateway whose turn is over. The next one it
            # opens where it sends its requests.
            break
        return b""  # the only answer that StreamAccessLogsResponse can be

    method = grpc.stream_unary_rpc_method_handler(receive)
    return grpc.method_handlers_generic_handler(SERVICE_NAME, {"StreamAccessLogs": method})


def read_entries(message: bytes) -> list[tuple[str, int]]:
    """`ip:port` and status of each answer in a message; answers that no rank gave are left out."""
    entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    found = []
    for entry in entries:
        address = entry.common_properties.upstream_remote_address.socket_address
        if address.address:
            found.append((endpoint(address.address, address.port_value), entry.response.response_code.value))
    return found
