"""The kinds of values that configuration sections are made of: addresses, ports, listeners.

Must never know a section's fields.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
LOOPBACK = "127.0.0.1"


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def endpoint(host: str, port: int) -> str:
    """`ip:port` as Envoy and the endpoint-picker protocol spell it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str) -> tuple[str, int]:
    """Host (an IP address without brackets) and port of `ip:port`; ValueError explains what is wrong."""
    host, separator, port = text.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not ip:port, e.g. 10.0.0.1:8000")
    return _ip_address(host.removeprefix("[").removesuffix("]")), int(port)


def wrong_choice(shown: str, value: str, choices: Collection[str]) -> str:
    """What to say of a value, `shown` as it stands in the file, that is none of `choices`."""
    if near := difflib.get_close_matches(value, choices, n=1):
        return f"is {shown}; did you mean {near[0]}?"
    return f"is {shown}; write one of: {', '.join(choices)}"


def _ip_address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        hint = "127.0.0.1" if value == "localhost" else "10.0.0.1"
        raise ValueError(
            f"{value!r} is not an IP address; Envoy addresses ranks by IP, so write e.g. {hint}"
        ) from None


def _listening_ip_address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address to listen on, e.g. {LOOPBACK}") from None


def _reachable_ip_address(value: str) -> str:
    address = ipaddress.ip_address(_ip_address(value))
    if address.is_unspecified:
        raise ValueError(f"{value!r} names no machine, so Envoy cannot send to it; write the address of one")
    return str(address)


def _not_a_bare_port(example: str) -> BeforeValidator:
    """Answers a port alone, quoted or not, with the whole address to write."""

    def check(value: object) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and value.isdecimal()):
            raise ValueError(f"is {value}, without an address; write {example}")
        return value

    return BeforeValidator(check)


def _canonical_endpoint(value: str) -> str:
    host, port = split_endpoint(value)
    return endpoint(_reachable_ip_address(host), port)


def _listen_address(value: str) -> str:
    if not value.startswith("unix:"):
        host, port = split_endpoint(value)
        return endpoint(host, port)
    path = value.removeprefix("unix:")
    if not path.startswith("/"):
        raise ValueError("write the socket's absolute path, e.g. unix:/run/wavegate/ext_proc.sock")
    if len(path.encode()) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the socket's path is longer than {MAX_UNIX_PATH_BYTES} bytes, the system's limit")
    return value


def _gateway_address(value: str) -> str:
    return _listen_address(value) if value.startswith("unix:") else _canonical_endpoint(value)


def _header_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", value):
        raise ValueError(f"{value!r} is not a header's name in lower case, e.g. x-tenant")
    return value


def _argument(value: object) -> object:
    """YAML reads `--port, 8000` as a string and a number; on a command line both are text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


MAX_UNIX_PATH_BYTES = 107
"""sun_path of Linux, less the closing zero."""

IpAddress = Annotated[str, AfterValidator(_listening_ip_address), Field(examples=[LOOPBACK])]
ReachableIpAddress = Annotated[str, AfterValidator(_reachable_ip_address), Field(examples=[LOOPBACK])]
Endpoint = Annotated[
    str,
    _not_a_bare_port("ip:port, such as 10.0.0.1:8000"),
    AfterValidator(_canonical_endpoint),
    Field(examples=["10.0.0.1:8000"]),
]
ListenAddress = Annotated[
    str,
    _not_a_bare_port(f"ip:port, such as {LOOPBACK}:9002, or unix:/path"),
    AfterValidator(_listen_address),
    Field(examples=[f"{LOOPBACK}:9002"]),
]
GatewayAddress = Annotated[
    str,
    _not_a_bare_port("ip:port, such as 10.0.0.2:9002, or unix:/path"),
    AfterValidator(_gateway_address),
    Field(examples=["10.0.0.2:9002"]),
]
HeaderName = Annotated[str, AfterValidator(_header_name), Field(examples=["x-tenant"])]
Argument = Annotated[str, BeforeValidator(_argument)]


@dataclass(frozen=True, slots=True)
class Listener:
    """One TCP address that a process of this deployment listens on."""

    field: str
    """Key path of the config field that sets the port."""
    host: str
    port: int
    purpose: str
    """What listens there, for messages."""

    def overlaps(self, other: Listener) -> bool:
        """Whether the two cannot listen at the same time."""
        hosts = {self.host, other.host}
        return self.port == other.port and (len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::"}))
