"""Renders the one route that all requests take: time limits, retries, headers that come and go.

Must never choose a rank: the pick does, or the ranks cluster's fallback policy.
"""

from __future__ import annotations

from ext_proc.protocol_names import (
    DECISION_HEADER,
    DECISION_KEY,
    DECISION_NAMESPACE,
    DESTINATION,
    GATEWAY_HEADERS,
)
from gateway.config_envoy import EnvoySection
from gateway.envoy_modes import MODES
from gateway.envoy_ranks import RANK_OF_REQUEST, RANKS_CLUSTER
from gateway.envoy_types import Json, typed

RANK_HEADER = "x-wavegate-rank"

_DECISION = f"%DYNAMIC_METADATA({DECISION_NAMESPACE}:{DECISION_KEY})%"


def route(envoy: EnvoySection) -> dict[str, Json]:
    """Everything goes to the ranks."""
    return {
        "match": {"prefix": "/"},
        "request_body_buffer_limit": _body_buffer_bytes(envoy),
        "route": {
            "cluster": RANKS_CLUSTER,
            "timeout": "0s",  # streams last as long as they last; the default is 15 s
            "retry_policy": _retry_policy(envoy.retries),
        },
        # vLLM takes the first as an index local to the server: anything but 0 is a 400 in external mode.
        "request_headers_to_remove": ["x-data-parallel-rank", DESTINATION, *GATEWAY_HEADERS],
        "response_headers_to_add": [
            {
                "header": {"key": RANK_HEADER, "value": RANK_OF_REQUEST},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            },
            # Left out where it is empty: where the client has not asked for it.
            {
                "header": {"key": DECISION_HEADER, "value": _DECISION},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            },
        ],
    }


def _body_buffer_bytes(envoy: EnvoySection) -> int:
    """What is kept of a body for ext_proc and for a retry; the default is the connection's buffer.

    Where ext_proc gets whole bodies, larger ones are answered 413; elsewhere they are not retried.
    """
    return envoy.partial_body_bytes if MODES[envoy.mode].sends_part_of_body else envoy.max_body_bytes


def _retry_policy(retries: int) -> dict[str, Json]:
    """Retries that cannot do the same work twice: the rank was not reached, or refused with 503.

    503 is what vLLM answers when its queue limits are reached. `reset` (connection lost after the request was
    sent) is left out on purpose: a prompt that kills a rank would be handed to the next one.
    Retries go down the pick's list. Once it is used up, the fallback policy chooses, and the predicate keeps
    it from choosing a rank that was tried.
    """
    return {
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": retries,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed("envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }
