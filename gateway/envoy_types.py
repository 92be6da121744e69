"""Small pieces that every part of an Envoy configuration is made of.

Must never know anything about wavegate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
"""Key of a cluster's HTTP settings, and the type of their message."""


def typed(message: str, **fields: Json) -> dict[str, Json]:
    """A `google.protobuf.Any` of the protobuf message with this full name."""
    return {"@type": f"type.googleapis.com/{message}", **fields}


def ip_address(host: str, port: int) -> dict[str, Json]:
    """A TCP address."""
    return {"socket_address": {"address": host, "port_value": port}}


def duration(seconds: float) -> str:
    """A `google.protobuf.Duration` in JSON: at most nine decimals, no exponent."""
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def status_filter(comparison: str, status: int) -> dict[str, Json]:
    """An access log filter on the response's status; `comparison` is Envoy's, e.g. "GE"."""
    value: Json = {"default_value": status, "runtime_key": "unused"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def circuit_breakers(max_concurrent: int) -> dict[str, Json]:
    """Envoy's defaults (1,024 requests, 3 retries at a time) would refuse ordinary load of long streams."""
    thresholds: Json = {
        "max_connections": max_concurrent,
        "max_pending_requests": max_concurrent,
        "max_requests": max_concurrent,
        "max_retries": max_concurrent,
    }
    return {"thresholds": [thresholds]}
