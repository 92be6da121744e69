"""The shape of `wavegate.yaml`: every field, its type, bounds, default and meaning.

Must never read files, the environment or a clock; `config_file` loads and explains errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from ext_proc.vocabulary import Rank
from gateway.config_envoy import EnvoySection
from gateway.config_gateway import GatewaySection
from gateway.config_groups import AdoptedGroup, EmbeddedGroup, Group, VllmGroup
from gateway.config_types import (
    Listener,
    Seconds,
    Section,
    split_endpoint,
)


class SupervisionSection(Section):
    """How groups are watched, and what is done about those that fail."""

    health_interval_s: Seconds = 0.5
    """Pause between two health checks of a rank by the gateway."""
    health_timeout_s: Seconds = 2.0
    hang_after_s: Seconds = 2.0
    """A rank that runs requests and makes no progress for so long takes its group out of rotation, and so
    does one that has not begun with a request and does not answer another for so long."""
    restart_hung_after_s: Seconds = 30.0
    """A hang this long ends in a restart of the group; a shorter one may pass. Not shorter than
    hang_after_s."""
    warm_up_timeout_s: Seconds = 120.0
    """How long the first request to a rank may take before its group serves."""
    first_backoff_s: Seconds = 1.0
    """Pause before a failed group is started again; it doubles with each failure in a row."""
    max_backoff_s: Seconds = 60.0
    stable_after_s: Seconds = 60.0
    """A group that has served this long before it fails is no crash loop."""
    max_failures_in_a_row: Annotated[int, Field(ge=1, le=1000)] = 5
    """After so many a group is given up, with a message."""
    silent_after_s: Seconds = 120.0
    """A rank that loads and writes nothing for so long is named."""

    @model_validator(mode="after")
    def _is_consistent(self) -> SupervisionSection:
        problems = []
        if self.restart_hung_after_s < self.hang_after_s:
            problems.append(
                f"restart_hung_after_s: {self.restart_hung_after_s:g} s is shorter than hang_after_s "
                f"({self.hang_after_s:g} s): a hang would end in a restart as soon as it is noticed; raise "
                "it, or lower hang_after_s"
            )
        if self.max_backoff_s < self.first_backoff_s:
            problems.append(
                f"max_backoff_s: {self.max_backoff_s:g} s is shorter than first_backoff_s "
                f"({self.first_backoff_s:g} s): no pause would be as long as the first; raise it, or lower "
                "first_backoff_s"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class Config(Section):
    """A whole `wavegate.yaml`."""

    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=256)]
    """The groups of ranks behind this gateway."""
    envoy: EnvoySection = EnvoySection()
    gateway: GatewaySection = GatewaySection()
    supervision: SupervisionSection = SupervisionSection()

    @model_validator(mode="after")
    def _no_clashes(self) -> Config:
        problems = [
            *self._shared_names(),
            *self._different_tokenizers(),
            *self._shared_endpoints(),
            *self._shared_ports(),
            *self._timeout_below_hold(),
            *self._always_stale(),
            *self._ext_proc_tls_half_set(),
            *self._gateway_twice(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _timeout_below_hold(self) -> Iterator[str]:
        hold_s, timeout_s = self.gateway.admission.max_hold_s, self.envoy.message_timeout_s
        if timeout_s <= hold_s:
            yield (
                f"envoy.message_timeout_s: {timeout_s:g} s is not longer than gateway.admission.max_hold_s "
                f"({hold_s:g} s): Envoy would give up on requests that are held; raise it or hold less long"
            )

    def _always_stale(self) -> Iterator[str]:
        reports = self.gateway.reports
        longest_s = reports.interval_s * (1 + reports.jitter_ratio)
        if reports.stale_after_s <= longest_s:
            yield (
                f"gateway.reports.stale_after_s: {reports.stale_after_s:g} s is not longer than the up to "
                f"{longest_s:g} s between two reports (interval_s, jitter_ratio): in between, ranks would "
                "count as unknown; raise it or scrape more often"
            )

    def _ext_proc_tls_half_set(self) -> Iterator[str]:
        gateway, envoy = self.gateway.ext_proc_tls, self.envoy.ext_proc_tls
        if envoy is not None and gateway is None:
            yield (
                "envoy.ext_proc_tls: the gateway speaks plain text, for gateway.ext_proc_tls is not set; "
                "set it or leave this out"
            )
        elif gateway is not None and gateway.client_ca and (envoy is None or envoy.cert is None):
            yield (
                "envoy.ext_proc_tls.cert: is needed, for the gateway asks Envoy for a certificate "
                "(gateway.ext_proc_tls.client_ca)"
            )

    def _gateway_twice(self) -> Iterator[str]:
        listed = Counter((self.gateway.ext_proc_listen, *self.envoy.standby_gateways))
        for address, count in listed.items():
            if count > 1:
                yield f"envoy.standby_gateways: {address} is a gateway of this file already; name others"

    def _shared_names(self) -> Iterator[str]:
        first: dict[str, int] = {}
        for position, group in enumerate(self.groups):
            earlier = first.setdefault(group.name, position)
            if earlier != position:
                yield (
                    f"groups[{position}].name: {group.name!r} is also that of groups[{earlier}]; "
                    "choose another"
                )

    def _different_tokenizers(self) -> Iterator[str]:
        first: dict[str, int] = {}
        for position, group in enumerate(self.groups):
            for name in (group.model, *group.other_names):
                earlier = first.setdefault(name, position)
                if tokenizer_of(group) != tokenizer_of(self.groups[earlier]):
                    yield (
                        f"groups[{position}].tokenizer: must be that of groups[{earlier}], for both serve "
                        f"{name!r}; give both the same one"
                    )
                    break

    def _shared_endpoints(self) -> Iterator[str]:
        first: dict[str, str] = {}
        for position, group in enumerate(self.groups):
            if not isinstance(group, AdoptedGroup):
                continue
            field = "endpoints" if group.endpoints else "hosts"
            for rank in group.ranks():
                earlier = first.setdefault(rank.endpoint, rank.name)
                if earlier != rank.name:
                    yield (
                        f"groups[{position}].{field}: {rank.endpoint} of rank {rank.name} is also that of "
                        f"rank {earlier}; give each rank its own address"
                    )

    def _shared_ports(self) -> Iterator[str]:
        by_port: dict[int, list[Listener]] = {}
        named: set[tuple[str, str]] = set()
        for listener in self.listeners():
            earlier = by_port.setdefault(listener.port, [])
            for other in earlier:
                fields = (other.field, listener.field)
                if listener.overlaps(other) and fields not in named:
                    named.add(fields)
                    yield (
                        f"{listener.field}: port {listener.port} of {listener.purpose} is also that of "
                        f"{other.purpose} ({other.field}); choose another for one of them"
                    )
            earlier.append(listener)

    def ranks(self) -> tuple[Rank, ...]:
        """All ranks of all groups, in the order of the file."""
        return tuple(rank for group in self.groups for rank in group.ranks())

    def listeners(self) -> Iterator[Listener]:
        """Every TCP address that `wavegate up` makes one of its processes listen on."""
        envoy, gateway = self.envoy, self.gateway
        yield Listener("envoy.port", envoy.host, envoy.port, "Envoy")
        yield Listener("envoy.admin_port", envoy.admin_host, envoy.admin_port, "Envoy's admin interface")
        yield Listener(
            "gateway.admin_port", gateway.admin_host, gateway.admin_port, "the gateway's admin API"
        )
        if not gateway.ext_proc_listen.startswith("unix:"):
            host, port = split_endpoint(gateway.ext_proc_listen)
            yield Listener("gateway.ext_proc_listen", host, port, "the ext_proc service")
        for position, group in enumerate(self.groups):
            if isinstance(group, EmbeddedGroup) or (isinstance(group, VllmGroup) and group.is_local):
                yield from group_listeners(group, f"groups[{position}]")


def tokenizer_of(group: Group) -> Path | None:
    """The folder of a group's tokenizer, if it has one."""
    return None if isinstance(group, EmbeddedGroup) else group.tokenizer


def group_listeners(group: EmbeddedGroup | VllmGroup, path: str, node: int = 0) -> Iterator[Listener]:
    """Every TCP address that the ranks of one machine listen on; `path` is the group's place in the file."""
    places = [rank for rank in group.ranks() if rank.index // group.ranks_per_node == node]
    if group.data_parallel_size > 1 and node == 0:
        address = group.launch().address if isinstance(group, VllmGroup) else group.host
        purpose = f"the handshake of group {group.name}"
        yield Listener(f"{path}.data_parallel_rpc_port", address, group.data_parallel_rpc_port, purpose)
    for rank in places:
        yield Listener(f"{path}.port", *split_endpoint(rank.endpoint), f"rank {rank.name}")
    if isinstance(group, VllmGroup) and group.kv_events_port is not None:
        for rank in places:
            for port in (group.kv_events_port, group.kv_events_port + group.data_parallel_size):
                host, purpose = split_endpoint(rank.endpoint)[0], f"the KV events of rank {rank.name}"
                yield Listener(f"{path}.kv_events_port", host, port + rank.index, purpose)
