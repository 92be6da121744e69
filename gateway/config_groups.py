"""The shape of a group in `wavegate.yaml`, one section for each way its ranks come to be.

Must never read files, the environment or a clock.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ext_proc.vocabulary import Rank
from gateway.config_types import (
    LOOPBACK,
    Argument,
    Endpoint,
    Port,
    ReachableIpAddress,
    Section,
    endpoint,
)

GROUP_NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,31}$"


class StepTimeSection(Section):
    """How long the engines' steps take, before the gateway has learned it from their reports."""

    fixed_ms: Annotated[float, Field(gt=0, le=60_000)] = 20.0
    prefill_us_per_token: Annotated[float, Field(gt=0, le=1_000_000)] = 80.0
    decode_us_per_sequence: Annotated[float, Field(gt=0, le=1_000_000)] = 100.0
    kv_ns_per_token: Annotated[float, Field(gt=0, le=1_000_000)] = 20.0


class GroupSection(Section):
    """What all groups have in common."""

    name: Annotated[str, Field(pattern=GROUP_NAME_PATTERN)]
    """Name of the group, unique; it is part of every rank's name."""
    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Model name clients ask for."""
    lock_step: bool = True
    """Whether several ranks step together, as those of a MoE model do; a single rank never does."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Token budget of the engines' steps. Where it is not said, it is learned."""
    step_time: StepTimeSection = StepTimeSection()


class EmbeddedGroup(GroupSection):
    """Ranks of the embedded engine, started by `wavegate up`: for development and evaluation only."""

    engine: Literal["embedded"]
    model: Annotated[str, Field(min_length=1, max_length=256)] = "wavegate-embedded"
    data_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    host: ReachableIpAddress = LOOPBACK
    port: Port = 8100
    """Rank i listens on port + i."""
    data_parallel_rpc_port: Port = 29550
    """Handshake port of rank 0; each group needs its own."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 2_048
    """Token budget of the ranks' steps."""
    args: tuple[Argument, ...] = ()
    """More options for every rank, as `wavegate rank --help` lists them."""
    rank_args: dict[int, tuple[Argument, ...]] = Field(default_factory=dict)
    """More options for single ranks, by index."""

    @model_validator(mode="after")
    def _ports_fit(self) -> EmbeddedGroup:
        last_port = self.port + self.data_parallel_size - 1
        if last_port > 65535:
            raise ValueError(f"port + data_parallel_size - 1 is {last_port}, above 65535; lower port")
        for index in self.rank_args:
            if not 0 <= index < self.data_parallel_size:
                raise ValueError(
                    f"rank_args names rank {index}, but ranks are 0 to {self.data_parallel_size - 1}"
                )
        return self

    def ranks(self) -> tuple[Rank, ...]:
        """The group's ranks in order of their index."""
        return tuple(
            Rank(self.name, index, endpoint(self.host, self.port + index))
            for index in range(self.data_parallel_size)
        )


class AdoptedGroup(GroupSection):
    """Ranks that somebody else started and supervises, by address."""

    engine: Literal["adopted"]
    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=1024)]
    """`ip:port` of each rank, in order of data-parallel rank."""

    def ranks(self) -> tuple[Rank, ...]:
        """The group's ranks in order of their index."""
        return tuple(Rank(self.name, index, address) for index, address in enumerate(self.endpoints))


Group = Annotated[EmbeddedGroup | AdoptedGroup, Field(discriminator="engine")]
