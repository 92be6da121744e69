"""`wavegate demo` as a newcomer sees it."""

from __future__ import annotations

import random
import re
import signal
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx2

from gateway.cli.demo import demo_config
from gateway.ports import port_problems
from tests.builders_processes import running
from tests.builders_wavegate import WavegateProcess, running_wavegate

OFFSETS = range(1_000, 3_000)
"""With these all ports of the demo are below those that the kernel may give to an outgoing connection."""


def free_offset(*, groups: int = 1, ranks: int = 4) -> int:
    """A port offset at which the demo's ports were free a moment ago."""
    while True:
        offset = random.choice(OFFSETS)
        if not port_problems(demo_config(groups=groups, ranks=ranks, port_offset=offset).listeners()):
            return offset


def demo(folder: Path, offset: int, *arguments: str) -> AbstractAsyncContextManager[WavegateProcess]:
    """The demo on ports of its own."""
    return running_wavegate(folder, "demo", "--port-offset", str(offset), *arguments)


async def test_the_demo_drives_all_ranks_and_ends_with_0(tmp_path: Path) -> None:
    async with demo(tmp_path, free_offset(), "--exit") as running_demo:
        assert await running_demo.exit_status(within_s=100) == 0
        output = running_demo.output
        assert "32 of 32 requests answered" in output
        served = dict(re.findall(r"(g0/\d) (\d+)", output.partition("requests answered: ")[2]))
        assert sorted(served) == ["g0/0", "g0/1", "g0/2", "g0/3"]
        for kind in ("chat ", "chat, streamed", "completion ", "completion, streamed"):
            assert kind in output
        assert re.search(r"rank +state +running +waiting +KV use +reserved +report age +wave", output)
        assert "nothing is left running" in output
        assert running_demo.descendants() == []


async def test_the_demo_serves_until_ctrl_c_and_says_what_to_try(tmp_path: Path) -> None:
    offset = free_offset(groups=2, ranks=1)
    async with demo(tmp_path, offset, "--groups", "2", "--ranks", "1") as running_demo:
        await running_demo.says("Serving until Ctrl-C", within_s=100)
        url = re.search(r"curl -i (\S+)", running_demo.output)
        assert url is not None
        async with httpx2.AsyncClient() as http:
            body = {"model": "wavegate-embedded", "messages": [{"role": "user", "content": "Hello"}]}
            answer = await http.post(url[1], json=body)
        assert answer.headers["x-wavegate-rank"] in {"g0/0", "g1/0"}
        started = running_demo.descendants()
        running_demo.process.send_signal(signal.SIGINT)
        assert await running_demo.exit_status() == 0
        assert running(started) == []


async def test_ctrl_c_during_the_drive_is_no_success(tmp_path: Path) -> None:
    async with demo(tmp_path, free_offset(ranks=1), "--ranks", "1", "--exit") as running_demo:
        await running_demo.says("#1 ")
        running_demo.process.send_signal(signal.SIGINT)
        assert await running_demo.exit_status() == 130
        assert running_demo.descendants() == []


async def test_a_taken_port_is_told_with_a_way_out(tmp_path: Path) -> None:
    offset = free_offset()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 8080 + offset))
        squatter.listen()
        async with demo(tmp_path, offset, "--exit") as running_demo:
            assert await running_demo.exit_status() == 1
            (line,) = running_demo.output.splitlines()
    way_out = re.fullmatch(
        rf"port {8080 + offset} for Envoy is taken by another process: "
        r"stop it, or move all ports of the demo: --port-offset (\d+)",
        line,
    )
    assert way_out is not None
    assert int(way_out[1]) != offset
