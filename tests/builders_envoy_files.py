"""The files in `envoy/`: what they hold, and how to start one over other ranks and another gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.builders_modes import cluster

ENVOY = Path(__file__).parents[1] / "envoy"
SAMPLES: Mapping[str, str] = {
    "envoy.yaml": "one-message.yaml",
    "envoy-header-only.yaml": "header-only.yaml",
    "envoy-full-duplex.yaml": "full-duplex.yaml",
}
"""Each configuration that stands alone, and the file in `envoy/samples` it is made from."""
BY_HAND = {"api-keys.yaml", "listener-tls.yaml", "other-route.yaml"}
"""Snippets that no configuration asks for: examples of Envoy's own filters."""


def content(name: str) -> Any:
    """One of the files as data."""
    return yaml.safe_load((ENVOY / name).read_text())


def with_addresses(configuration: Any, ranks: Sequence[str], gateway: str) -> Any:
    """The configuration over these ranks, named g0/0, g0/1, …, and this gateway."""
    endpoints = cluster(configuration, "ranks")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    by_name = {one["metadata"]["filter_metadata"]["envoy.lb"]["rank"]: one for one in endpoints}
    assert len(by_name) == len(ranks)
    for index, rank in enumerate(ranks):
        by_name[f"g0/{index}"]["endpoint"]["address"] = _address(rank)
    (asked,) = cluster(configuration, "ext_proc")["load_assignment"]["endpoints"]
    asked["lb_endpoints"][0]["endpoint"]["address"] = _address(gateway)
    return configuration


def _address(endpoint: str) -> Any:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
