"""The shape of the section `gateway` in `wavegate.yaml`: the process that decides, and how it does.

Must never read files, the environment or a clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from ext_proc.policies import make_policy, policy_names
from ext_proc.protocol_names import EXPLAIN_HEADER, TENANT_HEADER
from ext_proc.request_head import HeadNames
from gateway.config_types import (
    LOOPBACK,
    HeaderName,
    IpAddress,
    ListenAddress,
    Port,
    Seconds,
    Section,
    wrong_choice,
)


class ReportsSection(Section):
    """How the ranks' own reports are collected."""

    interval_s: Seconds = 0.1
    """Mean time between two scrapes of one rank's /metrics."""
    jitter_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Each interval is drawn from interval × (1 ± jitter), so that ranks are not scraped in step."""
    timeout_s: Seconds = 1.0
    stale_after_s: Seconds = 2.0
    """Age at which a report no longer says anything about the rank's load."""
    down_after_failures: Annotated[int, Field(ge=1, le=100)] = 3
    """Failed scrapes in a row after which a rank, and with it its group, is taken out of rotation."""


class ExtProcTls(Section):
    """TLS on the ext_proc listener; files in PEM format, read at the start."""

    cert: Path
    """Certificate chain of the gateway."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """If given, Envoy must show a certificate that this authority has signed."""


class EndpointPickerSection(Section):
    """Gateways that speak the endpoint-picker protocol (full-duplex streamed bodies)."""

    max_collected_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 1 << 30
    """Memory for request bodies that are still arriving, over all streams; beyond it requests get 429."""
    pass_malformed_bodies: bool = False
    """Let the ranks answer requests without a model or prompt, instead of refusing them with 400."""
    model_names: dict[str, str] = Field(default_factory=dict)
    """Name that clients use for a model: name that the ranks know, put in its place in the request."""
    conformance_tests: bool = False
    """Obey the protocol's conformance tests. Never in production: any client then chooses its rank."""


class TargetsSection(Section):
    """What a request should get to count as well served; admission works towards it."""

    ttft_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 2_000.0
    """Time to first token."""
    tpot_ms: Annotated[float, Field(gt=0, le=60_000)] = 100.0
    """Time per output token after the first, the mean over a request."""


class AdmissionSection(Section):
    """When requests are held in the gateway, and how many."""

    phases: bool = True
    """Let lock-step groups prefill together where single prefills would break the TPOT target."""
    phases_from_requests_per_rank: Annotated[float, Field(ge=0, le=10_000)] = 2.5
    """With fewer decoding on average nothing waits for a phase: TTFT goes before the TPOT of so few. 0 lets
    prompts wait however few decode."""
    max_hold_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """No request waits in the gateway longer than this."""
    backlog_ms: Annotated[float, Field(gt=0, le=60_000)] = 250.0
    """Prefill a rank may have ahead of it and still be given more; beyond, requests wait in the gateway."""
    max_held_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1_024
    """Requests that may wait at once; further ones are answered 429."""
    max_held_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 16_000_000
    """Prompt tokens that may wait at once, over all requests."""
    tenant_header: HeaderName = TENANT_HEADER
    """Header that names a request's tenant: tenants take turns, by prompt tokens, when requests wait. The
    default one ends at the gateway, any other is passed on to the rank."""


class SessionsSection(Section):
    """Keeping the requests of a session, such as a conversation, on one rank."""

    header: HeaderName | None = None
    """Header that names a request's session; the rank gets it too. Without it there are no sessions."""
    bound_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500.0
    """The session's last rank is preferred while it costs at most so much more than the best one."""
    max_sessions: Annotated[int, Field(ge=1, le=10_000_000)] = 65_536
    """Sessions remembered, about 150 bytes each; those without a request for longest are forgotten."""


class AdaptersSection(Section):
    """Keeping the requests for a LoRA adapter on ranks that run it, where the ranks say what they run."""

    bound_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500.0
    """Such a rank is preferred while it costs at most so much more than the best one."""


class GatewaySection(Section):
    """The gateway process: ext_proc service and admin API."""

    admin_host: IpAddress = LOOPBACK
    admin_port: Port = 9090
    admin_token_file: Path | None = None
    """File with a secret that whoever changes something through the admin API must show, supervisors too.
    Without it nobody is asked: keep admin_host on loopback, or guard it."""
    ext_proc_listen: ListenAddress = f"{LOOPBACK}:9002"
    """Where Envoy reaches the ext_proc service: `ip:port` or `unix:/path`."""
    ext_proc_tls: ExtProcTls | None = None
    """TLS for gateways on other machines; without it the ext_proc service speaks plain text."""
    max_streams: Annotated[int, Field(ge=1, le=1_000_000)] = 65_536
    """Requests under way at once; Envoy balances further ones by itself."""
    endpoint_picker: EndpointPickerSection = EndpointPickerSection()
    policy: str = "lockstep"
    """How ranks are compared; the baselines are there to be measured against, and never hold a request."""
    targets: TargetsSection = TargetsSection()
    admission: AdmissionSection = AdmissionSection()
    sessions: SessionsSection = SessionsSection()
    adapters: AdaptersSection = AdaptersSection()
    explain_to_clients: bool = True
    """Show the decision in a response header to clients that send x-wavegate-explain: 1."""
    log_decisions: bool = False
    """Write one line for each request placed: where, why, and what the ranks would have cost."""
    pick_list_length: Annotated[int, Field(ge=1, le=8)] = 3
    """Ranks in a pick: the first, and where Envoy's retries go."""
    drain_timeout_s: Seconds = 30.0
    """On shutdown, how long requests under way may take before they are cut."""
    reports: ReportsSection = ReportsSection()

    @field_validator("policy")
    @classmethod
    def _policy_can_be_made(cls, value: str) -> str:
        if value not in policy_names():
            raise ValueError(wrong_choice(f'"{value[:60]}"', value, policy_names()))
        make_policy(value)
        return value

    @model_validator(mode="after")
    def _affinity_can_be_bounded(self) -> GatewaySection:
        asked_for = []
        if self.sessions.header is not None:
            asked_for.append("sessions.header")
        # That of `wavegate config show`, which writes all defaults, is nobody's wish.
        if self.adapters.bound_ms != AdaptersSection().bound_ms:
            asked_for.append("adapters.bound_ms")
        if asked_for and not make_policy(self.policy).in_seconds:
            why = f"the policy {self.policy} does not tell how much worse one rank is than another"
            remedy = "leave it out, or use the policy lockstep"
            raise ValueError("\n".join(f"{field}: {why}; {remedy}" for field in asked_for))
        return self

    @property
    def head_names(self) -> HeadNames:
        """The headers that are looked at."""
        return HeadNames(
            tenant=self.admission.tenant_header,
            session=self.sessions.header,
            explain=EXPLAIN_HEADER if self.explain_to_clients else None,
        )
