"""The names that Envoy and this service must spell alike, each once: of metadata, of a header, of a promise.

Those that begin with `x-gateway-` or `envoy.` are the endpoint-picker protocol's, 1.0.0 (proposal 004 of
gateway-api-inference-extension). Whoever renders Envoy's configuration takes them from here too.
"""

from __future__ import annotations

LB_NAMESPACE = "envoy.lb"
"""Namespace of the dynamic metadata that Envoy's load balancing reads and writes."""
DESTINATION = "x-gateway-destination-endpoint"
"""The picked endpoints: key in `LB_NAMESPACE`, and name of the header that says the same."""
SERVED_KEY = "x-gateway-destination-endpoint-served"
"""Key in `LB_NAMESPACE`: the endpoint that the request was sent to."""
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
"""Key in `SUBSET_NAMESPACE`: the endpoints to choose from."""

STREAM_END_METADATA = ("x-wavegate-stream-ends-with", "response")
"""gRPC metadata by which a gateway's configuration promises that no stream ends before its response."""
