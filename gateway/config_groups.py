"""The shape of a group in `wavegate.yaml`, one section for each way its ranks come to be.

Must never read files, the environment or a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

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
from vllm_ranks.launcher.command import (
    GroupLaunch,
    KvEvents,
    RankPlace,
    contradictions,
)

EMBEDDED_RANKS_OWN = "--kv-events-config"
"""What the launcher gives to vLLM's ranks, and embedded ones can be given by their configuration."""
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
    other_names: Annotated[tuple[str, ...], Field(max_length=4096)] = ()
    """More names under which clients may ask for what the group serves: aliases, LoRA adapters."""
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
    lock_step: bool = True
    """Whether several ranks step together, as those of a MoE model do; a single rank never does."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 2_048
    """Token budget of the ranks' steps."""
    args: tuple[Argument, ...] = ()
    """More options for every rank, as `wavegate rank --help` lists them."""
    rank_args: dict[int, tuple[Argument, ...]] = Field(default_factory=dict)
    """More options for single ranks, by index."""

    @model_validator(mode="after")
    def _is_consistent(self) -> EmbeddedGroup:
        last_port = self.port + self.data_parallel_size - 1
        if last_port > 65535:
            raise ValueError(f"port + data_parallel_size - 1 is {last_port}, above 65535; lower port")
        for argument in contradictions(self.args):
            if argument.startswith(EMBEDDED_RANKS_OWN):
                continue
            instead = _field_instead(argument, EmbeddedGroup)
            raise ValueError(f"args: wavegate itself gives the ranks {argument}; {instead}")
        for index in self.rank_args:
            if not 0 <= index < self.data_parallel_size:
                raise ValueError(
                    f"rank_args names rank {index}, but ranks are 0 to {self.data_parallel_size - 1}"
                )
        return self

    @property
    def ranks_per_node(self) -> int:
        """How many ranks run on this machine: all."""
        return self.data_parallel_size

    def ranks(self) -> tuple[Rank, ...]:
        """The group's ranks in order of their index."""
        return tuple(
            Rank(self.name, index, endpoint(self.host, self.port + index))
            for index in range(self.data_parallel_size)
        )


class ModelGroup(GroupSection):
    """What groups of real ranks have in common."""

    tokenizer: Path | None = None
    """Folder with the model's tokenizer.json, tokenizer_config.json and chat template, read at the start. The
    gateway then makes tokens of prompts as the ranks do: prompt lengths are exact, and so is what each rank
    has in its prefix cache, where ranks publish KV cache events. It costs the gateway about 5 ms of CPU time
    for a prompt of 4,096 tokens, and 75 bytes of memory for each block of a rank's KV cache. Needs
    `pip install 'wavegate[tokenizer]'`."""


LOCAL = "local"


def _hosts(value: object) -> object:
    if isinstance(value, str) and value != LOCAL:
        raise ValueError(f"is {value!r}; write local, or a list of the machines' addresses")
    return () if value == LOCAL else value


Hosts = Annotated[
    tuple[ReachableIpAddress, ...],
    BeforeValidator(_hosts),
    PlainSerializer(lambda hosts: list(hosts) or LOCAL),
    WithJsonSchema(
        {"anyOf": [{"const": LOCAL}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    ),
]
"""`local` is an empty tuple."""


class VllmGroup(ModelGroup):
    """Ranks that are `vllm serve` processes, started and supervised by wavegate."""

    engine: Literal["vllm"]
    model_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """What `vllm serve` loads, if it is not `model`: a folder, or a name on the Hugging Face hub."""
    moe: bool | None = None
    """Whether the model is a mixture of experts. By default its config.json tells. A dense model runs as
    independent replicas: vLLM refuses external load-balancer mode for it."""
    data_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    ranks_on: Hosts = Field(default=(), alias="ranks")
    """`local`, or the addresses of the machines that run the ranks, an equal share each: there
    `wavegate ranks --node 0`, `--node 1`, … start them."""
    host: ReachableIpAddress = LOOPBACK
    """Address that local ranks listen on."""
    port: Port = 8100
    """The first rank of a machine listens here, the next ones on the ports after it."""
    data_parallel_address: ReachableIpAddress | None = None
    """Where the other ranks find rank 0; by default the address rank 0 listens on."""
    data_parallel_rpc_port: Port = 29550
    """Handshake port of rank 0; each group on its machine needs its own."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices of each rank."""
    devices: tuple[Argument, ...] | None = None
    """Devices of a machine, shared out to its ranks in this order; by default 0, 1, 2, … An empty list leaves
    the ranks with what they find, as on a CPU."""
    device_variable: str = "CUDA_VISIBLE_DEVICES"
    """Environment variable that tells a rank its devices."""
    kv_events_port: Port | None = None
    """Rank i publishes what its prefix cache holds on this port + i; by default it does not."""
    executable: str = "vllm"
    """The `vllm` command, a path or found on PATH."""
    args: tuple[Argument, ...] = ()
    """More options of `vllm serve`, for every rank."""
    env: dict[str, Argument] = Field(default_factory=dict)
    """More environment variables, for every rank."""
    ready_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 1_800.0
    """How long the group may take to load."""

    @model_validator(mode="after")
    def _is_consistent(self) -> VllmGroup:
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if len(set(self.ranks_on)) < len(self.ranks_on):
            yield "ranks names a machine twice; each machine runs all its ranks in one go"
        if self.data_parallel_size % self.nodes:
            yield f"{self.nodes} machines cannot share data_parallel_size {self.data_parallel_size} equally"
            return
        if (last_port := self.port + self.ranks_per_node - 1) > 65535:
            yield f"port + ranks of a machine - 1 is {last_port}, above 65535; lower port"
        if self.kv_events_port is not None and self.kv_events_port + 2 * self.data_parallel_size > 65536:
            yield (
                "kv_events_port: the ports after it, two for each rank, end above 65535; lower kv_events_port"
            )
        needed = self.ranks_per_node * self.tensor_parallel_size
        if self.devices and len(self.devices) != needed:
            yield (
                f"devices names {len(self.devices)}, but a machine runs {self.ranks_per_node} ranks with "
                f"tensor_parallel_size {self.tensor_parallel_size} each, which makes {needed}"
            )
        for argument in contradictions(self.args):
            yield f"args: wavegate itself gives the ranks {argument}; {_field_instead(argument, VllmGroup)}"

    @property
    def lock_step(self) -> bool:
        """Whether the ranks step together."""
        return self.moe is not False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The machines' addresses, in order of node."""
        return self.ranks_on or (self.host,)

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on the machine that `wavegate up` runs on."""
        return not self.ranks_on

    @property
    def nodes(self) -> int:
        """On how many machines ranks run."""
        return len(self.hosts)

    @property
    def ranks_per_node(self) -> int:
        """How many ranks each machine runs."""
        return self.data_parallel_size // self.nodes

    @property
    def served(self) -> str:
        """What `vllm serve` is given."""
        return self.model_path or self.model

    def ranks(self) -> tuple[Rank, ...]:
        """The group's ranks in order of their index."""
        return tuple(
            Rank(self.name, place.index, endpoint(place.host, place.port)) for place in self._places()
        )

    def launch(self) -> GroupLaunch:
        """What the ranks' command lines depend on."""
        kv_port = self.kv_events_port
        return GroupLaunch(
            executable=self.executable,
            model=self.served,
            served_model_name=self.model,
            places=tuple(self._places()),
            address=self.data_parallel_address or self.hosts[0],
            rpc_port=self.data_parallel_rpc_port,
            tensor_parallel_size=self.tensor_parallel_size,
            device_variable=self.device_variable,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_events=None if kv_port is None else KvEvents(kv_port, kv_port + self.data_parallel_size),
            args=self.args,
            environment=self.env,
        )

    def replicas(self) -> tuple[VllmGroup, ...]:
        """The same ranks as groups of one, for a dense model."""
        if self.data_parallel_size == 1:
            return (self.model_copy(update={"moe": False}),)
        return tuple(
            self.model_copy(
                update={
                    "name": f"{self.name}-{place.index}",
                    "moe": False,
                    "data_parallel_size": 1,
                    "ranks_on": (place.host,) if self.ranks_on else (),
                    "port": place.port,
                    "devices": place.devices,
                    "kv_events_port": None
                    if self.kv_events_port is None
                    else self.kv_events_port + 2 * place.index,
                }
            )
            for place in self._places()
        )

    def _places(self) -> Iterator[RankPlace]:
        for index in range(self.data_parallel_size):
            node, local = divmod(index, self.ranks_per_node)
            yield RankPlace(index, node, self.hosts[node], self.port + local, self._devices(local))

    def _devices(self, local: int) -> tuple[str, ...]:
        first, last = local * self.tensor_parallel_size, (local + 1) * self.tensor_parallel_size
        if self.devices is None:
            return tuple(str(device) for device in range(first, last))
        return self.devices[first:last]


def _field_instead(argument: str, group: type[Section]) -> str:
    """What to write instead of an option that the launcher decides."""
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    return f"write {name}: … instead" if name in group.model_fields else "leave it out"


class AdoptedGroup(ModelGroup):
    """Ranks that somebody else started and supervises: by address, or by hosts and the first port of each."""

    engine: Literal["adopted"]
    endpoints: Annotated[tuple[Endpoint, ...], Field(max_length=1024)] = ()
    """`ip:port` of each rank, in order of data-parallel rank."""
    hosts: Annotated[tuple[ReachableIpAddress, ...], Field(max_length=1024)] = ()
    """Instead of endpoints: the machines in order of rank, each with ranks on consecutive ports, as vLLM's
    --data-parallel-multi-port-external-lb lays them out."""
    port: Port = 8000
    """With hosts: the port of each machine's first rank."""
    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 1
    """With hosts: vLLM's --data-parallel-size-local."""
    lock_step: bool = True
    """Whether several ranks step together, as those of a MoE model do; a single rank never does."""

    @model_validator(mode="after")
    def _says_where(self) -> AdoptedGroup:
        if bool(self.endpoints) == bool(self.hosts):
            given = "both" if self.endpoints else "neither"
            raise ValueError(f"needs endpoints or hosts to find the ranks, and has {given}")
        if (last_port := self.port + self.ranks_per_host - 1) > 65535:
            raise ValueError(f"port + ranks_per_host - 1 is {last_port}, above 65535; lower port")
        return self

    def ranks(self) -> tuple[Rank, ...]:
        """The group's ranks in order of their index."""
        by_port_rule = (
            endpoint(host, self.port + local) for host in self.hosts for local in range(self.ranks_per_host)
        )
        return tuple(
            Rank(self.name, index, address) for index, address in enumerate(self.endpoints or by_port_rule)
        )


Group = Annotated[EmbeddedGroup | VllmGroup | AdoptedGroup, Field(discriminator="engine")]
