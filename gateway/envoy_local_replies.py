"""Renders how Envoy's own answers look: in the shape that OpenAI clients read.

The ext_proc service's answers pass this way too. They carry no response flag, so their bodies stay, but for
413: that is told in the same words by whoever finds a body too large.
"""

from __future__ import annotations

from gateway.config_envoy import EnvoySection
from gateway.envoy_types import Json, status_filter

_NO_RANK_FLAGS: list[Json] = ["UH", "UF", "UO", "UC", "UR", "UT", "LR", "URX"]
"""Response flags of replies that Envoy made because no rank could be reached or none answered."""


def local_replies(envoy: EnvoySection) -> dict[str, Json]:
    """One mapper for bodies that are too large, one for requests that no rank answered."""
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
        ]
    }


def _error(kind: str, code: str, message: str) -> dict[str, Json]:
    return {"json_format": {"error": {"message": message, "type": kind, "param": None, "code": code}}}
