"""Starting the engines of a front end, and the coordinator of rank 0 (vLLM 0.32 `launch_core_engines`).

    rank 0: coordinator, then the ROUTER every engine of the group shakes hands with, then local engines
    others: a ROUTER for their own engines, which also shake hands with rank 0

Must never serve requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from vllm_ranks.engine import wire
from vllm_ranks.engine.config import RankConfig
from vllm_ranks.engine.coordinator import CoordinatorAddresses, CoordinatorConfig
from vllm_ranks.engine.engine_process import EngineProcessConfig
from vllm_ranks.engine.handshake import EngineRegistry, expected_engines, wait_for_engine_startup
from vllm_ranks.engine.processes import Child, describe_exit, first_exit, start_module
from vllm_ranks.engine.sockets import Context, Socket, ipc_address, open_socket, tcp_address

logger = logging.getLogger(__name__)


class LaunchError(RuntimeError):
    """The rank cannot start; the message is for the user."""


class EngineLaunch:
    """The processes behind one front end (or behind several, of one launch)."""

    def __init__(self, config: RankConfig, directory: Path) -> None:
        """`directory`: for ipc sockets, private to this user."""
        self._config = config
        self._directory = directory
        self.engines: list[Child] = []
        self.coordinator: Child | None = None

    @property
    def children(self) -> list[Child]:
        """Everything that was started, engines first."""
        return [*self.engines, *([] if self.coordinator is None else [self.coordinator])]

    async def start(self, context: Context, inputs: Sequence[str], outputs: Sequence[str]) -> Startup:
        """Start coordinator and engines; they connect to the given sockets of each front end.

        Raises:
            LaunchError: the coordinator did not start, or the handshake port is taken.
        """
        parallel = self._config.parallel
        addresses = wire.EngineAddresses(inputs=list(inputs), outputs=list(outputs))
        if parallel.needs_coordinator and parallel.data_parallel_rank == 0:
            addresses = _with_coordinator(addresses, await self._start_coordinator())
        listener = None
        group: dict[str, int | str | list[int]] = {}
        if parallel.lock_step and parallel.data_parallel_rank == 0:
            # Opened here, used by engine 0: the port in the handshake is one that is certainly free.
            listener = _listen(parallel.data_parallel_master_ip)
            group = {
                "data_parallel_master_ip": parallel.data_parallel_master_ip,
                "data_parallel_master_port": listener.getsockname()[1],
                "_data_parallel_master_port_list": [],
                "_coord_store_port": 0,
                "data_parallel_size": parallel.data_parallel_size,
            }
        registry = EngineRegistry(parallel, expected_engines(parallel), wire.HandshakeInit(addresses, group))
        handshake_address, own_address = self._handshake_addresses()
        try:
            router = open_socket(context, zmq.ROUTER, bind=own_address or handshake_address)
            # Without this ZMQ drops a second engine of the same rank, and nobody learns of the mistake.
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        except zmq.ZMQError as error:
            raise LaunchError(
                f"cannot listen for the engines' handshake on {own_address or handshake_address}: "
                f"{error.strerror}; another group may use the same --data-parallel-rpc-port"
            ) from None
        for rank in parallel.local_ranks:
            fd = listener.fileno() if listener is not None and rank == 0 else None
            await self._start_engine(
                rank, handshake_address, own_address, local_client=True, collective_fd=fd
            )
        if listener is not None:
            listener.close()
        return Startup(self, router, registry)

    async def start_headless(self) -> None:
        """Start only engines, for a front end on another node."""
        parallel = self._config.parallel
        address = tcp_address(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
        for rank in parallel.local_ranks:
            await self._start_engine(rank, address, None, local_client=False, collective_fd=None)

    def _handshake_addresses(self) -> tuple[str, str | None]:
        """Rank 0's handshake address, and this front end's own if that is another."""
        parallel = self._config.parallel
        if parallel.data_parallel_size_local == parallel.data_parallel_size:
            return ipc_address(self._directory), None
        address = tcp_address(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
        is_rank_0 = parallel.data_parallel_rank == 0 or not parallel.local_engines_only
        return address, None if is_rank_0 else ipc_address(self._directory)

    async def _start_coordinator(self) -> CoordinatorAddresses:
        parallel = self._config.parallel
        config = CoordinatorConfig(
            engine_count=parallel.data_parallel_size,
            lock_step=parallel.is_moe,
            host=parallel.data_parallel_master_ip,
            front_local_only=not parallel.local_engines_only,
            back_local_only=parallel.data_parallel_size == parallel.data_parallel_size_local,
            ipc_directory=str(self._directory),
        )
        child = await start_module(
            "Coordinator", "vllm_ranks.engine.coordinator", msgspec.json.encode(config), capture_stdout=True
        )
        self.coordinator = child
        timeout_s = self._config.server.coordinator_start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                line = await child.stdout.readline()
        except TimeoutError:
            raise LaunchError(
                "DP Coordinator process failed to report ZMQ addresses "
                f"within timeout={timeout_s:g} seconds during startup."
            ) from None
        if not line:
            raise LaunchError("DP Coordinator process failed during startup.")
        logger.info("Started DP Coordinator process (PID: %d)", child.pid)
        return msgspec.json.decode(line, type=CoordinatorAddresses)

    async def _start_engine(
        self,
        rank: int,
        handshake_address: str,
        client_handshake_address: str | None,
        *,
        local_client: bool,
        collective_fd: int | None,
    ) -> None:
        config = EngineProcessConfig(
            rank_config=self._config,
            data_parallel_rank=rank,
            handshake_address=handshake_address,
            client_handshake_address=client_handshake_address,
            local_client=local_client,
            collective_fd=collective_fd,
        )
        child = await start_module(
            f"EngineCore_DP{rank}",
            "vllm_ranks.engine.engine_process",
            msgspec.json.encode(config),
            pass_fds=() if collective_fd is None else (collective_fd,),
        )
        self.engines.append(child)


class Startup:
    """Engines that are starting."""

    def __init__(self, launch: EngineLaunch, router: Socket, registry: EngineRegistry) -> None:
        self._launch = launch
        self._router = router
        self._registry = registry

    async def wait(self, also_watch: Sequence[Child] = ()) -> None:
        """Shake hands until every engine is READY.

        Args:
            also_watch: other processes whose end makes the wait pointless.

        Raises:
            HandshakeError: an engine that must not be here.
            LaunchError: a process ended before the engines were ready.
        """
        shaking_hands = asyncio.ensure_future(wait_for_engine_startup(self._router, self._registry))
        watching = asyncio.ensure_future(first_exit([*self._launch.children, *also_watch]))
        try:
            await asyncio.wait((shaking_hands, watching), return_when=asyncio.FIRST_COMPLETED)
            if not shaking_hands.done():
                child = watching.result()
                raise LaunchError(
                    "Engine core initialization failed. See root cause above. "
                    f"Failed core proc(s): {child.name} ({describe_exit(child.returncode)})"
                )
            await shaking_hands
        finally:
            shaking_hands.cancel()
            watching.cancel()
            # Late senders of READY must not find a peer that never reads.
            self._router.close()


def _with_coordinator(
    addresses: wire.EngineAddresses, coordinator: CoordinatorAddresses
) -> wire.EngineAddresses:
    return msgspec.structs.replace(
        addresses,
        coordinator_input=coordinator.back_publish,
        coordinator_output=coordinator.back_output,
        frontend_stats_publish_address=coordinator.front_publish,
    )


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot open the group's collective on {host} (--data-parallel-address): {error.strerror}"
        ) from None
    return listener
