"""Renders how Envoy's own answers look: in the shape that OpenAI clients read.

The ext_proc service's answers pass this way too. They carry no response flag, so their bodies stay, but for
413: that is told in the same words by whoever finds a body too large.
"""

from __future__ import annotations

from gateway.config_envoy import EnvoySection
from gateway.envoy_types import Json, status_filter, typed

_NO_RANK_FLAGS: list[Json] = ["UH", "UF", "UO", "UC", "UR", "UT", "LR", "URX"]
"""Response flags of replies that Envoy made because no rank could be reached or none answered."""

_OVERLOAD: Json = {
    "extension_filter": {
        "name": "envoy.access_loggers.extension_filters.cel",
        "typed_config": typed(
            "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
            expression="response.code_details == 'overload'",
        ),
    }
}
"""Refused requests have no flag; those that are cut off are answered 500, with one that says bad protocol."""
RETRY_AFTER_S = 1


def local_replies(envoy: EnvoySection) -> dict[str, Json]:
    """Mappers for bodies that are too large, requests that no rank answered, and want of memory."""
    too_large = f"The request body is larger than {envoy.max_body_bytes} bytes, the limit of this gateway."
    return {
        "mappers": [
            {
                "filter": status_filter("EQ", 413),
                "body_format_override": _error("invalid_request_error", "request_too_large", too_large),
            },
            {
                "filter": {"response_flag_filter": {"flags": _NO_RANK_FLAGS}},
                "body_format_override": _error(
                    "server_error", "no_rank_available", "No rank could answer: %LOCAL_REPLY_BODY%"
                ),
            },
            {
                "filter": _OVERLOAD,
                "status_code": 503,
                "headers_to_add": [{"header": {"key": "retry-after", "value": str(RETRY_AFTER_S)}}],
                "body_format_override": _error(
                    "server_error", "out_of_memory", "Envoy's memory is used up: %LOCAL_REPLY_BODY%"
                ),
            },
        ]
    }


def _error(kind: str, code: str, message: str) -> dict[str, Json]:
    return {"json_format": {"error": {"message": message, "type": kind, "param": None, "code": code}}}
