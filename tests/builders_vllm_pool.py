"""Real vLLM ranks behind the real gateway and Envoy: `with vllm_pool(folder) as pool:`, on the CPU.

One lock-step group of two ranks of the tiny MoE checkpoint, started by `wavegate up` as a user starts it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from gateway.vllm_cpu import cpu_group
from tests.builders_group import descendants
from tests.builders_ports import consecutive_free_ports, free_port
from tests.builders_vllm import vllm_python
from tests.builders_wavegate import COMMAND
from vllm_ranks.tiny_moe import write_tiny_moe

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
RANKS = 2


class VllmPool:
    """A running deployment."""

    def __init__(self, folder: Path, config: Any) -> None:
        self.folder = folder
        self.config = config
        self.group_name: str = config["groups"][0]["name"]
        self.model: str = config["groups"][0]["model"]
        self.url = f"http://127.0.0.1:{config['envoy']['port']}"
        self.admin_url = f"http://127.0.0.1:{config['gateway']['admin_port']}"
        self.rank_urls = [f"http://127.0.0.1:{config['groups'][0]['port'] + rank}" for rank in range(RANKS)]
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen([*COMMAND, "up"], cwd=folder, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        """What `wavegate up` has said."""
        return (self.folder / "output.txt").read_text()

    def rank_log(self, rank: int) -> str:
        """The log of a rank since it was started last."""
        path = self.folder / ".wavegate" / "logs" / f"rank-{self.group_name}-{rank}.log"
        return path.read_text(errors="replace")

    def gateway_log(self) -> str:
        """The log of the gateway."""
        return (self.folder / ".wavegate" / "logs" / "gateway.log").read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for a condition; fails the test after the limit or when the deployment has ended."""
        end_s = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"wavegate up ended while waiting until {what}:\n{self.output}")
            if time.monotonic() > end_s:
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.output[-5000:]}")
            time.sleep(0.05)

    def group(self) -> Any:
        """What the gateway says about the group."""
        return self.get_json(f"{self.admin_url}/groups/{self.group_name}")

    def is_serving(self) -> bool:
        """Whether the group is in rotation."""
        try:
            return bool(self.group()["in_rotation"])
        except OSError:
            return False

    def status(self) -> list[Any]:
        """The gateway's rank table."""
        ranks: list[Any] = self.get_json(f"{self.admin_url}/status")["ranks"]
        return ranks

    @staticmethod
    def get_json(url: str) -> Any:
        """A JSON answer."""
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    @staticmethod
    def get_text(url: str) -> str:
        """A text answer."""
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def health(self, rank: int) -> str:
        """What `/health` of a rank says now: a status, `refused` or `no answer`."""
        try:
            with urllib.request.urlopen(f"{self.rank_urls[rank]}/health", timeout=1) as answer:
                return str(answer.status)
        except urllib.error.HTTPError as error:
            return str(error.code)
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return "no answer" if "timed out" in str(error) else "refused"

    def metric(self, rank: int, name: str, **labels: str) -> float:
        """A rank's own series, summed over those whose labels match."""
        total, found = 0.0, False
        for line in self.get_text(f"{self.rank_urls[rank]}/metrics").splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total, found = total + float(value), True
        assert found, f"no series {name} {labels}"
        return total

    def processes(self, *words: str) -> list[int]:
        """Ids of the deployment's processes whose command line contains all these words."""
        found = descendants(self.process.pid)
        return sorted(pid for pid, command in found.items() if all(word in command for word in words))

    def server(self, rank: int) -> int:
        """The API server of a rank."""
        port = str(self.config["groups"][0]["port"] + rank)
        servers = self.processes("/vllm serve", f"--port {port} ")
        return next(pid for pid in servers if "launcher.guard" not in _command_line(pid))

    def tree(self, rank: int) -> list[int]:
        """The API server of a rank, and all it has started."""
        server = self.server(rank)
        return [server, *descendants(server)]

    def stop(self) -> None:
        """Stop in order, and leave nothing."""
        below = [self.process.pid, *descendants(self.process.pid)]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # as it should be


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@contextmanager
def vllm_pool(
    folder: Path,
    *,
    args: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    supervision: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
) -> Iterator[VllmPool]:
    """Start the deployment in `folder`, wait until it serves, stop it.

    Args:
        folder: an empty one.
        args: further options of `vllm serve`.
        env: further variables of the ranks.
        supervision: fields of that section.
        group: further fields of the group.
    """
    checkpoint = write_tiny_moe(folder / "tiny-moe")
    section = cpu_group(
        name="moe", model="tiny", checkpoint=checkpoint, executable=str(Path(vllm_python()).with_name("vllm"))
    )
    section["args"] += args
    section["env"] |= env or {}
    config = {
        "groups": [
            {
                **section,
                "data_parallel_size": RANKS,
                "port": consecutive_free_ports(RANKS),
                "data_parallel_rpc_port": free_port(),
                **(group or {}),
            }
        ],
        "envoy": {"port": free_port(), "admin_port": free_port(), "worker_threads": 1},
        "gateway": {"admin_port": free_port(), "ext_proc_listen": f"127.0.0.1:{free_port()}"},
        "supervision": supervision or {},
    }
    (folder / "wavegate.yaml").write_text(yaml.safe_dump(config))
    pool = VllmPool(folder, config)
    try:
        pool.wait_until(lambda: "serving on http://" in pool.output, START_LIMIT_S, "it serves")
        yield pool
    finally:
        pool.stop()
