"""Running a rank: which processes there are, how they start, and how they end.

    external, or one API server   this process is the API server; engines (and coordinator) are children
    several API servers           this process starts them, the engines and the coordinator, and watches
    headless                      this process starts and watches engines only

Must never answer requests itself; `api_server` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from vllm_ranks.engine.api_process import ApiProcessConfig, ApiService
from vllm_ranks.engine.config import RankConfig
from vllm_ranks.engine.engine_launch import EngineLaunch, LaunchError
from vllm_ranks.engine.handshake import HandshakeError
from vllm_ranks.engine.logs import configure_logging
from vllm_ranks.engine.processes import Child, describe_exit, end, first_exit, start_module
from vllm_ranks.engine.sockets import Context, ipc_address, tcp_address
from vllm_ranks.engine.version import NOTICE

logger = logging.getLogger(__name__)

DIRECTORY_PREFIX = "wavegate-rank-"


def run_rank(config: RankConfig) -> int:
    """Run until stopped by SIGTERM or SIGINT, or until something dies; the result is the exit code."""
    configure_logging("APIServer" if config.server.api_server_count == 1 else "Launcher")
    logger.info(NOTICE)
    try:
        with _private_directory() as directory:
            return uvloop.run(_run(config, directory))
    except (LaunchError, HandshakeError, TimeoutError) as error:
        logger.error("%s", error)
        return 1


async def _run(config: RankConfig, directory: Path) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    launch = EngineLaunch(config, directory)
    try:
        match config.server.api_server_count:
            case 0:
                return await _run_headless(launch, stop)
            case 1:
                return await _run_single_api_server(config, launch, directory, stop)
            case _:
                return await _run_multi_api_server(config, launch, directory, stop)
    finally:
        # Whatever happened: nothing that was started is left.
        await end(launch.children, 0.0)


async def _run_single_api_server(
    config: RankConfig, launch: EngineLaunch, directory: Path, stop: asyncio.Event
) -> int:
    listener = bind_http(config)
    context = Context()
    service = ApiService(config, context, _api_addresses(config, directory, 0))
    try:
        startup = await launch.start(context, [service.input_address], [service.output_address])
        await _unless_stopped(stop, startup.wait())
        await _unless_stopped(stop, service.wait_until_ready())
        if stop.is_set():
            return 0
        await service.listen(listener, launch)
        return await _serve(config, service, launch, stop)
    finally:
        await service.close()


async def _serve(config: RankConfig, service: ApiService, launch: EngineLaunch, stop: asyncio.Event) -> int:
    """Serve until told to stop, or until the engine dies."""
    stopping = asyncio.ensure_future(stop.wait())
    failing = asyncio.ensure_future(service.failed())
    engine_exit = asyncio.ensure_future(first_exit(launch.engines))
    try:
        await asyncio.wait((stopping, failing, engine_exit), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            failing.cancel()
            timeout_s = config.server.shutdown_timeout_s
            logger.info("[shutdown] stopping engines: %s", f"drain {timeout_s:g} s" if timeout_s else "abort")
            # The HTTP server goes on meanwhile: what is new is answered "abort" by draining engines.
            await end(launch.engines, timeout_s)
            return 0
        if engine_exit.done():
            child = engine_exit.result()
            logger.error("%s ended: %s", child.name, describe_exit(child.returncode))
        service.engine_died()
        # Requests under way get their error, /health says 503, then the server goes.
        await asyncio.wait((stopping,), timeout=config.server.engine_dead_grace_s)
        return 1
    finally:
        for future in (stopping, failing, engine_exit):
            future.cancel()


async def _run_multi_api_server(
    config: RankConfig, launch: EngineLaunch, directory: Path, stop: asyncio.Event
) -> int:
    count = config.server.api_server_count
    listener = bind_http(config)
    # Before prometheus_client is imported in the children: their metrics then share files.
    metrics_directory = directory / "metrics"
    metrics_directory.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_directory)
    addresses = [_api_addresses(config, directory, index) for index in range(count)]
    servers: list[Child] = []
    context = Context()
    try:
        resolved = [
            await _start_api_server(config, directory, listener, addresses[i], i, servers)
            for i in range(count)
        ]
        startup = await launch.start(context, [a[0] for a in resolved], [a[1] for a in resolved])
        await _unless_stopped(stop, startup.wait(also_watch=servers))
        if stop.is_set():
            return 0
        return await _watch(config, [*servers, *launch.children], stop, launch, servers)
    finally:
        await end(servers, 0.0)
        context.destroy(linger=0)


async def _start_api_server(
    config: RankConfig,
    directory: Path,
    listener: socket.socket,
    addresses: tuple[str, str],
    index: int,
    servers: list[Child],
) -> tuple[str, str]:
    """Start one API server; the addresses its sockets were bound to."""
    process_config = ApiProcessConfig(
        rank_config=config,
        client_index=index,
        listener_fd=listener.fileno(),
        bind_addresses=addresses,
        directory=str(directory),
    )
    child = await start_module(
        f"APIServer_{index}",
        "vllm_ranks.engine.api_process",
        msgspec.json.encode(process_config),
        pass_fds=(listener.fileno(),),
        capture_stdout=True,
    )
    servers.append(child)
    line = await child.stdout.readline()
    if not line:
        raise LaunchError(f"{child.name} failed during startup.")
    return msgspec.json.decode(line, type=tuple[str, str])


async def _watch(
    config: RankConfig,
    children: Sequence[Child],
    stop: asyncio.Event,
    launch: EngineLaunch,
    servers: Sequence[Child],
) -> int:
    """Any process that ends by itself ends the launch (vLLM `wait_for_completion_or_failure`)."""
    stopping = asyncio.ensure_future(stop.wait())
    dying = asyncio.ensure_future(first_exit(children))
    try:
        await asyncio.wait((stopping, dying), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await end(launch.engines, config.server.shutdown_timeout_s)
            return 0
        child = dying.result()
        logger.error("%s ended: %s", child.name, describe_exit(child.returncode))
        # API servers have requests to fail and 503 to say before they go.
        await asyncio.wait([s.exited for s in servers], timeout=config.server.engine_dead_grace_s)
        return 1
    finally:
        stopping.cancel()
        dying.cancel()


async def _run_headless(launch: EngineLaunch, stop: asyncio.Event) -> int:
    await launch.start_headless()
    stopping = asyncio.ensure_future(stop.wait())
    dying = asyncio.ensure_future(first_exit(launch.engines))
    await asyncio.wait((stopping, dying), return_when=asyncio.FIRST_COMPLETED)
    dying.cancel()
    if stopping.done():
        return 0
    stopping.cancel()
    return 1


async def _unless_stopped(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Await start-up work, but not beyond SIGTERM."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        working.cancel()
        stopping.cancel()


def _api_addresses(config: RankConfig, directory: Path, index: int) -> tuple[str, str]:
    """Where an API server binds the sockets of its engines: ipc when all of them are local."""
    parallel = config.parallel
    if parallel.local_engines_only or parallel.data_parallel_size_local == parallel.data_parallel_size:
        return ipc_address(directory), ipc_address(directory)
    return tcp_address(parallel.data_parallel_master_ip, 0), tcp_address(parallel.data_parallel_master_ip, 0)


def bind_http(config: RankConfig) -> socket.socket:
    """Bind the HTTP port before anything starts; it does not listen yet.

    Raises:
        LaunchError: the port is taken.
    """
    host, port = config.server.host, config.server.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    return listener


@contextmanager
def _private_directory() -> Iterator[Path]:
    """A directory for sockets that only this user can enter, gone when the rank ends."""
    _remove_leftovers()
    directory = Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers() -> None:
    """Directories of ranks that were killed before they could remove them."""
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*-*"):
        pid = directory.name.removeprefix(DIRECTORY_PREFIX).partition("-")[0]
        if pid.isdigit() and not _exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True
