"""The names that Envoy and this service must spell alike, each once: of metadata, of headers, of a promise.

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

PRIORITY_HEADER = "x-wavegate-priority"
"""How urgent a request is: an integer, lower is more urgent; it goes before the body's `priority`."""
TENANT_HEADER = "x-wavegate-tenant"
"""Whose request it is, unless the configuration names another header."""
EXPLAIN_HEADER = "x-wavegate-explain"
"""With a value other than 0: the client wants to see the decision."""
GATEWAY_HEADERS = (PRIORITY_HEADER, TENANT_HEADER, EXPLAIN_HEADER)
"""Requests' headers that are meant for the gateway alone: ranks do not get them. A header that the
configuration names instead, for tenants or for sessions, belongs to the application and is passed on."""

DECISION_NAMESPACE = "wavegate"
DECISION_KEY = "decision"
"""Key in `DECISION_NAMESPACE`: the decision in words and numbers, where a client asks for it."""
DECISION_HEADER = "x-wavegate-decision"
"""The response's header that shows it."""

STREAM_END_METADATA = ("x-wavegate-stream-ends-with", "response")
"""gRPC metadata by which a gateway's configuration promises that no stream ends before its response."""
