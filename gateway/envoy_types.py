"""Small pieces that every part of an Envoy configuration is made of.

Must never know anything about wavegate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None


def typed(message: str, **fields: Json) -> dict[str, Json]:
    """A `google.protobuf.Any` of the protobuf message with this full name."""
    return {"@type": f"type.googleapis.com/{message}", **fields}


def ip_address(host: str, port: int) -> dict[str, Json]:
    """A TCP address."""
    return {"socket_address": {"address": host, "port_value": port}}


def duration(seconds: float) -> str:
    """A `google.protobuf.Duration` in JSON: at most nine decimals, no exponent."""
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
