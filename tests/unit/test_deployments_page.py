"""The page on deployments shows what `wavegate ranks --dry-run` prints, and its scripts do what they say."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config_file import parse
from gateway.dry_run import CommandFormat, render_commands

PAGE = Path(__file__).parents[2] / "docs" / "deployments.md"
BLOCK = re.compile(
    r"<!-- (configuration|printed): ([a-z-]+)(?: --as ([a-z]+))? -->\n```\w+\n(.*?)```\n", re.DOTALL
)


def blocks() -> list[tuple[str, str, str, str]]:
    """Kind, name of the configuration, format and text of every marked block."""
    return [(kind, name, form or "shell", text) for kind, name, form, text in BLOCK.findall(PAGE.read_text())]


def printed(name: str, form: str) -> str:
    """What is printed for a configuration of the page."""
    (text,) = (text for kind, named, _, text in blocks() if kind == "configuration" and named == name)
    return render_commands(parse(text, name), None, CommandFormat(form))


PRINTED = [block[1:] for block in blocks() if block[0] == "printed"]


@pytest.mark.parametrize(
    ("name", "form", "text"), PRINTED, ids=[f"{name}-{form}" for name, form, _ in PRINTED]
)
def test_what_the_page_shows_is_what_is_printed(name: str, form: str, text: str) -> None:
    assert text == printed(name, form), f"put this into {PAGE.name}"


def test_the_page_shows_all_that_was_promised() -> None:
    shown = {(name, form) for name, form, _ in PRINTED}
    assert shown == {
        ("one-machine", "shell"),
        ("two-machines", "shell"),
        ("two-machines", "slurm"),
        ("two-machines", "kubernetes"),
    }


def test_every_configuration_of_the_page_is_valid() -> None:
    found = re.findall(r"```yaml\n(groups:.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 4
    for text in found:
        parse(text, PAGE.name)


def stub(folder: Path, name: str, script: str) -> None:
    """A command in the place of a real one."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with stand-ins for commands that scripts call; that of `vllm` writes down its arguments."""
    addresses = "case $2 in machine-a|prod-0.prod) echo 10.1.0.1 x;; machine-b) echo 10.1.0.2 x;; esac"
    stub(tmp_path, "getent", addresses)
    stub(tmp_path, "scontrol", "printf 'machine-a\\nmachine-b\\n'")
    stub(tmp_path, "srun", 'input=$(cat); for id in 0 1; do SLURM_NODEID=$id bash <<<"$input"; done; true')
    stub(tmp_path, "vllm", f'(flock 9; echo "$CUDA_VISIBLE_DEVICES" "$@" >&9) 9>>{tmp_path}/started')
    return tmp_path


def run(script: str, folder: Path, **environment: str) -> str:
    """Run a script; whether it ends well does not matter."""
    path = f"{folder}:{os.environ['PATH']}"
    finished = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert finished.stderr == ""
    return finished.stdout


def expected(devices: int, host: str, port: int, rank: int, address: str) -> str:
    """What one rank is started with."""
    return (
        f"{devices} serve Qwen/Qwen3-30B-A3B --host {host} --port {port} --data-parallel-size 16 "
        f"--data-parallel-rank {rank} --data-parallel-external-lb --data-parallel-address {address} "
        "--data-parallel-rpc-port 29550 --gpu-memory-utilization 0.9"
    )


def started(folder: Path, count: int) -> list[str]:
    """What `vllm` was called with, as soon as it was called so often."""
    for _ in range(200):
        lines = (folder / "started").read_text().splitlines() if (folder / "started").exists() else []
        if len(lines) == count:
            return sorted(lines)
        subprocess.run(["sleep", "0.05"], check=True)
    raise AssertionError(lines)


def test_the_slurm_job_starts_every_rank_on_its_machine_of_the_job(commands: Path) -> None:
    said = run(printed("two-machines", "slurm"), commands, SLURM_JOB_NODELIST="x")
    first = "10.1.0.1:8100 10.1.0.1:8101"
    assert said.startswith(f"endpoints: {first}")
    assert started(commands, 16) == sorted(
        expected(rank % 8, f"10.1.0.{1 + rank // 8}", 8100 + rank % 8, rank, "10.1.0.1") for rank in range(16)
    )


@pytest.mark.parametrize("node", [0, 1])
def test_each_pod_starts_its_ranks_and_finds_rank_0_by_name(commands: Path, node: int) -> None:
    documents: list[Any] = list(yaml.safe_load_all(printed("two-machines", "kubernetes")))
    service, stateful_set = documents
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    assert stateful_set["spec"]["replicas"] == 2
    assert stateful_set["spec"]["serviceName"] == service["metadata"]["name"] == "prod"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert [port["containerPort"] for port in container["ports"]] == list(range(8100, 8108))
    own = f"10.1.0.{1 + node}"
    run(container["args"][0], commands, POD_IP=own, HOSTNAME=f"prod-{node}")
    assert started(commands, 8) == sorted(
        expected(local, own, 8100 + local, 8 * node + local, "10.1.0.1") for local in range(8)
    )
