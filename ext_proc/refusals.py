"""The gateway's own answers to requests it refuses, in the shape that OpenAI clients read.

The one table from a reason to what a client is told.
"""

from __future__ import annotations

from math import ceil

import msgspec

from ext_proc import messages
from ext_proc.decision import DropReason, Refused

DROP_REASON_HEADER = "x-wavegate-drop-reason"

_INVALID = "invalid_request_error"
_OVERLOADED = "rate_limit_error"

_TOLD: dict[DropReason, tuple[str, str]] = {
    DropReason.NO_RANK: ("server_error", "No rank is available for this request."),
    DropReason.QUEUE_FULL: (_OVERLOADED, "Too many requests are waiting; try again later."),
    DropReason.SATURATED: (_OVERLOADED, "All ranks are busy; try again later."),
    DropReason.MALFORMED_HEADER: (_INVALID, "A header or the path is not UTF-8."),
    DropReason.MALFORMED_BODY: (_INVALID, "The request body is not a JSON object."),
    DropReason.NO_MODEL: (_INVALID, "The request body names no model: 'model' must be a string."),
    DropReason.NO_PROMPT: (_INVALID, "The request body has no prompt, messages or input."),
    DropReason.BODY_TOO_LARGE: (_INVALID, "The request body is larger than this gateway accepts."),
    DropReason.TOO_MANY_BODIES: (
        _OVERLOADED,
        "Too many large requests are under way; try again later.",
    ),
}
"""By reason: OpenAI's type of the error, and its text."""


def answer(refused: Refused) -> bytes:
    """The reply that answers a refused request."""
    kind, message = _TOLD[refused.reason]
    error = {"message": message, "type": kind, "param": None, "code": refused.reason.value}
    headers = {"content-type": "application/json", DROP_REASON_HEADER: refused.reason.value}
    if refused.retry_after_s is not None:
        headers["retry-after"] = str(max(1, ceil(refused.retry_after_s)))
    return messages.answered(
        refused.status, headers, msgspec.json.encode({"error": error}), f"wavegate_{refused.reason.value}"
    )
