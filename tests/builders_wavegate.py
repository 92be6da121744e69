"""The `wavegate` command as a process of its own: `async with running_wavegate(…) as command:`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.builders_ports import consecutive_free_ports, free_port
from tests.builders_processes import command_line, is_running

COMMAND = (sys.executable, "-P", "-m", "gateway.cli")


class WavegateProcess:
    """A running command."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        """All it has written, to stdout and stderr."""
        return self._output.read_text()

    async def says(self, text: str, *, times: int = 1, within_s: float = 60.0) -> None:
        """Return once it has written `text` so often."""
        async with asyncio.timeout(within_s):
            while self.output.count(text) < times:
                if self.process.returncode is not None:
                    raise AssertionError(f"it ended without saying {text!r}:\n{self.output}")
                await asyncio.sleep(0.05)

    async def exit_status(self, *, within_s: float = 60.0) -> int:
        """Wait for its end."""
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    def descendants(self, *, matching: str = "") -> list[int]:
        """Ids of all processes it has started, directly or not, whose command line contains `matching`."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, pending = [], [self.process.pid]
        while pending:
            for pid in children.get(pending.pop(), []):
                found.append(pid)
                pending.append(pid)
        return [pid for pid in found if is_running(pid) and matching in command_line(pid)]


@asynccontextmanager
async def running_wavegate(folder: Path, *arguments: str) -> AsyncIterator[WavegateProcess]:
    """Run `wavegate <arguments>` in `folder`; at the end it is killed if it still runs."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, cwd=folder, stdout=file, stderr=file
        )
    command = WavegateProcess(process, output)
    try:
        yield command
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


def write_config(
    folder: Path,
    groups: Sequence[dict[str, Any]],
    *,
    envoy: dict[str, Any] | None = None,
    supervision: dict[str, Any] | None = None,
    **gateway: Any,
) -> Any:
    """Write `wavegate.yaml` with these groups on free ports, and return it as data."""
    data = {
        "groups": list(groups),
        "envoy": {"port": free_port(), "admin_port": free_port(), "worker_threads": 1, **(envoy or {})},
        "gateway": {"admin_port": free_port(), "ext_proc_listen": f"127.0.0.1:{free_port()}", **gateway},
        "supervision": supervision or {},
    }
    (folder / "wavegate.yaml").write_text(yaml.safe_dump(data))
    return data


def adopted_group(*endpoints: str) -> dict[str, Any]:
    """Ranks that the test runs."""
    return {"engine": "adopted", "name": "g0", "model": "m", "endpoints": list(endpoints)}


def embedded_group(size: int = 1, **fields: Any) -> dict[str, Any]:
    """Ranks that wavegate runs."""
    return {
        "engine": "embedded",
        "name": "g0",
        "data_parallel_size": size,
        "port": consecutive_free_ports(size),
        "data_parallel_rpc_port": free_port(),
        **fields,
    }
