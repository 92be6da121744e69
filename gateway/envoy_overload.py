"""Renders what bounds Envoy's memory as a whole, and its connections: by itself Envoy bounds neither.

Bodies that are arriving are most of the memory that clients can make Envoy take, so refusing new requests is
not enough: on Envoy 1.40 bodies under way grew to three times a limit at which only those were refused.
"""

from __future__ import annotations

from gateway.config_envoy import EnvoySection
from gateway.envoy_types import Json, duration, typed

MAX_CONNECTIONS_MONITOR = "envoy.resource_monitors.global_downstream_max_connections"
HEAP_MONITOR = "envoy.resource_monitors.fixed_heap"

REFRESH_S = 0.25
"""What arrives between two looks at the heap comes on top of its limit."""
SHRINK_AT = 0.50
"""What is free but not given back does not count as used, yet a container's limit counts it."""
REFUSE_AT = 0.95
LARGE_STREAM_BYTES_LOG2 = 20
"""A request that holds less than a mebibyte is not worth ending for its memory."""


def overload_manager(envoy: EnvoySection) -> dict[str, Json]:
    """The overload manager of the bootstrap configuration."""
    return {
        "refresh_interval": duration(REFRESH_S),
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": LARGE_STREAM_BYTES_LOG2},
        "resource_monitors": [
            {
                "name": MAX_CONNECTIONS_MONITOR,
                "typed_config": typed(
                    "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                    max_active_downstream_connections=envoy.max_concurrent_requests,
                ),
            },
            {
                "name": HEAP_MONITOR,
                "typed_config": typed(
                    "envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                    max_heap_size_bytes=envoy.max_heap_bytes,
                ),
            },
        ],
        "actions": [
            _when("envoy.overload_actions.shrink_heap", {"threshold": {"value": SHRINK_AT}}),
            _when("envoy.overload_actions.stop_accepting_requests", {"threshold": {"value": REFUSE_AT}}),
            # Of HTTP/2 alone; the largest go first.
            _when(
                "envoy.overload_actions.reset_high_memory_stream",
                {"scaled": {"scaling_threshold": REFUSE_AT, "saturation_threshold": 1.0}},
            ),
        ],
        # The same for HTTP/1.1: requests of which more arrives.
        "loadshed_points": [
            _when("envoy.load_shed_points.http1_server_abort_dispatch", {"threshold": {"value": 1.0}})
        ],
    }


def _when(name: str, heap: dict[str, Json]) -> Json:
    return {"name": name, "triggers": [{"name": HEAP_MONITOR, **heap}]}
