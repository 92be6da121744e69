"""The pieces of the rendered configuration that an Envoy which somebody already runs needs, one by one.

Must never render anything that `render` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.config import Config
from gateway.envoy_filters import filters_before_the_router, router_settings
from gateway.envoy_gateways import ext_proc_cluster
from gateway.envoy_listener import connection_manager_settings, listener_settings, virtual_host_settings
from gateway.envoy_ranks import ranks_cluster
from gateway.envoy_route import route
from gateway.envoy_types import Json


class Part(StrEnum):
    """Names of the pieces."""

    CLUSTERS = "clusters"
    HTTP_FILTERS = "http-filters"
    ROUTE = "route"
    CONNECTION_MANAGER = "connection-manager"
    LISTENER = "listener"
    ROUTER = "router"
    VIRTUAL_HOST = "virtual-host"


@dataclass(frozen=True, slots=True)
class _Piece:
    place: str
    """Where it goes, for people."""
    render: Callable[[Config], Json]


_PIECES: Mapping[Part, _Piece] = {
    Part.CLUSTERS: _Piece(
        "items for static_resources.clusters",
        lambda config: [ranks_cluster(config), ext_proc_cluster(config)],
    ),
    Part.HTTP_FILTERS: _Piece(
        "items for http_filters of the HTTP connection manager: in this order, right before the router",
        lambda config: filters_before_the_router(config.envoy, config.gateway.head_names),
    ),
    Part.ROUTE: _Piece(
        "an item for the routes of a virtual host; narrow its match as you need",
        lambda config: [route(config.envoy)],
    ),
    Part.CONNECTION_MANAGER: _Piece(
        "fields of the HTTP connection manager",
        lambda config: connection_manager_settings(config.envoy),
    ),
    Part.LISTENER: _Piece("fields of the listener", lambda config: listener_settings(config.envoy)),
    Part.ROUTER: _Piece("fields of the router filter's typed_config", lambda _config: router_settings()),
    Part.VIRTUAL_HOST: _Piece("fields of the virtual host", lambda _config: virtual_host_settings()),
}


def render_part(config: Config, part: Part) -> Json:
    """One piece as plain data."""
    return _PIECES[part].render(config)


def place_of(part: Part) -> str:
    """Where a piece goes in an Envoy configuration."""
    return _PIECES[part].place
