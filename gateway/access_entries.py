"""Hears from Envoy what no ext_proc stream tells: which answers failed, which requests go to another rank.

The receiving end of two access logs that have only these. In the cheaper modes of ext_proc no response passes
through the gateway, so this is how it learns, at once, that a rank answers with errors (one that drains does
so, with `/health` 200), and where a request went that the picked rank has refused. Must never judge a rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from gateway.config_types import endpoint

SERVICE_NAME = "envoy.service.accesslog.v3.AccessLogService"

QUIET_STREAM_S = 1.0
"""A stream on which nothing has come for so long is ended: Envoy would keep it, even one to a standby gateway
whose turn is over. The next one it opens where it sends its requests."""
LONGEST_STREAM_S = 10.0
"""For the same reason even one that is never quiet, though what is under way at its end is lost."""

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class EntryReader(Protocol):
    """Told what Envoy's entries say, each time of a rank by its `ip:port`."""

    def on_failed_answer(self, endpoint: str, status: int) -> None:
        """The rank has answered a request with this HTTP status, an error of its own."""
        ...

    def on_retry(self, request_id: str, endpoint: str) -> None:
        """The request, which another rank has refused, is sent to this one."""
        ...


def access_entries_handler(reader: EntryReader) -> grpc.GenericRpcHandler:
    """The gRPC service that Envoy's access logs stream to."""

    async def receive(messages: AsyncIterator[bytes], _context: _Context) -> bytes:
        clock = asyncio.get_running_loop().time
        end_s = clock() + LONGEST_STREAM_S
        try:
            async with asyncio.timeout(QUIET_STREAM_S) as quiet:
                async for message in messages:
                    _tell(reader, message)
                    quiet.reschedule(min(clock() + QUIET_STREAM_S, end_s))
        except TimeoutError:
            pass  # it has been quiet, or open, for long enough
        return b""  # the only answer that StreamAccessLogsResponse can be

    method = grpc.stream_unary_rpc_method_handler(receive)
    return grpc.method_handlers_generic_handler(SERVICE_NAME, {"StreamAccessLogs": method})


def _tell(reader: EntryReader, message: bytes) -> None:
    for entry in StreamAccessLogsMessage.FromString(message).http_logs.log_entry:
        common = entry.common_properties
        address = common.upstream_remote_address.socket_address
        if not address.address:
            continue  # no rank was reached
        rank = endpoint(address.address, address.port_value)
        if common.access_log_type == AccessLogType.UpstreamPoolReady:
            reader.on_retry(entry.request.request_id, rank)
        else:
            reader.on_failed_answer(rank, entry.response.response_code.value)
