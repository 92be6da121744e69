"""What a gateway tells beside headers and body (`metadata_context`): the subset hint and the served endpoint.

Endpoint-picker protocol 1.0.0 (gateway-api-inference-extension, proposal 004). Must never fail on odd values.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.struct_pb2 import Value

from ext_proc.protocol_names import LB_NAMESPACE, SERVED_KEY, SUBSET_KEY, SUBSET_NAMESPACE
from ext_proc.vocabulary import Subset


def subset_hint(message: ProcessingRequest) -> Subset | None:
    """The ranks to choose from; `None` if the message does not limit them."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET_KEY not in metadata[SUBSET_NAMESPACE].fields:
        return None
    return subset_of(_texts(metadata[SUBSET_NAMESPACE].fields[SUBSET_KEY]))


def served_endpoint(message: ProcessingRequest) -> str | None:
    """The endpoint that serves the request, as the gateway says with the response; `None` if it does not."""
    metadata = message.metadata_context.filter_metadata
    if LB_NAMESPACE not in metadata or SERVED_KEY not in metadata[LB_NAMESPACE].fields:
        return None
    return metadata[LB_NAMESPACE].fields[SERVED_KEY].string_value or None


def subset_of(entries: Iterable[str]) -> Subset:
    """The subset that `ip:port` and `ip` entries name, several in one entry if commas part them."""
    endpoints, addresses = set(), set()
    for entry in entries:
        for part in map(str.strip, entry.split(",")):
            address = _address(part.removeprefix("[").removesuffix("]"))
            if address is not None:
                addresses.add(address)
                continue
            host, _, port = part.rpartition(":")
            address = _address(host.removeprefix("[").removesuffix("]"))
            if address is not None:
                endpoints.add(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    return Subset(frozenset(endpoints), frozenset(addresses))


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _texts(value: Value) -> Iterator[str]:
    """The strings of a list, or a single string; whatever else is there names no rank."""
    for entry in value.list_value.values if value.HasField("list_value") else [value]:
        if entry.HasField("string_value"):
            yield entry.string_value
