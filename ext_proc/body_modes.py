"""Which of ext_proc's body modes a stream is in, and what the end of such a stream means.

Both are told by the first message (`protocol_config`) and by the messages that follow; nothing is configured.
"""

from __future__ import annotations

from dataclasses import dataclass

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

NONE: int = ProcessingMode.NONE
STREAMED: int = ProcessingMode.STREAMED
BUFFERED: int = ProcessingMode.BUFFERED
BUFFERED_PARTIAL: int = ProcessingMode.BUFFERED_PARTIAL
FULL_DUPLEX: int = ProcessingMode.FULL_DUPLEX_STREAMED


class UnsupportedModeError(Exception):
    """The gateway sends bodies in a way that this service does not speak (`GRPC`)."""


@dataclass(frozen=True, slots=True)
class BodyModes:
    """How the bodies of one stream travel."""

    request: int
    response: int


ENDPOINT_PICKER = BodyModes(FULL_DUPLEX, FULL_DUPLEX)
ONE_MESSAGE = BodyModes(BUFFERED, NONE)


def body_modes(first: ProcessingRequest) -> BodyModes:
    """The modes of the stream that begins with `first`. Raises UnsupportedModeError.

    Envoy sends `protocol_config` since 1.34. Gateways that send none and begin with headers speak the
    endpoint-picker protocol, which knows one mode only; all others send bodies whole.
    """
    if not first.HasField("protocol_config"):
        return ENDPOINT_PICKER if first.HasField("request_headers") else ONE_MESSAGE
    config = first.protocol_config
    modes = BodyModes(config.request_body_mode, config.response_body_mode)
    if max(modes.request, modes.response) > FULL_DUPLEX:
        raise UnsupportedModeError(
            f"body modes {ProcessingMode.BodySendMode.Name(modes.request)} and "
            f"{ProcessingMode.BodySendMode.Name(modes.response)} are not supported"
        )
    return modes


def stream_may_end_before_response(modes: BodyModes, last_message: str) -> bool:
    """Whether Envoy may have closed the stream while the response was still under way.

    Envoy closes a stream when it expects no further message on it (envoy 1.40 ext_proc.cc,
    `closeGrpcStreamIfLastRespReceived`): after the reply to the last message of the request if no response
    phase is to be sent, after that to the response headers if nothing but them is. It never does so after the
    body of a buffered mode, nor before a response body that is sent. Which response headers and trailers are
    sent is not in `protocol_config`, so `True` means: perhaps.

    Args:
        modes: the stream's modes.
        last_message: kind of the last message received, e.g. "request_body".
    """
    if modes.response != NONE:
        return False
    if last_message == "request_body":
        return modes.request not in (BUFFERED, BUFFERED_PARTIAL)
    return True
