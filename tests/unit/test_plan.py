"""Which ranks run on which machine, and as which processes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gateway.config import Config
from gateway.deployment import rank_listeners
from gateway.dry_run import CommandFormat, render_commands
from gateway.plan import UnitPlan, rank_units

EMBEDDED = {"engine": "embedded", "name": "e", "port": 9500}
LOCAL = {"engine": "vllm", "name": "l", "model": "m", "moe": True, "data_parallel_size": 2, "env": {"A": "1"}}
SPREAD = {
    "engine": "vllm",
    "name": "s",
    "model": "m",
    "moe": True,
    "data_parallel_size": 4,
    "ranks": ["10.0.0.1", "10.0.0.2"],
    "kv_events_port": 5557,
}
ADOPTED = {"engine": "adopted", "name": "a", "model": "m", "endpoints": ["10.0.0.9:8000"]}


def config(*groups: dict[str, Any]) -> Config:
    """A configuration of these groups."""
    return Config.model_validate({"groups": groups})


def names(units: tuple[UnitPlan, ...]) -> list[str]:
    """The processes that are started."""
    return [process.name for unit in units for process in unit.processes]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, ["rank e/0", "rank l/0", "rank l/1"]),
        (0, ["rank e/0", "rank l/0", "rank l/1", "rank s/0", "rank s/1"]),
        (1, ["rank s/2", "rank s/3"]),
    ],
)
def test_every_machine_runs_its_share_and_the_first_one_what_is_not_spread(
    node: int | None, expected: list[str]
) -> None:
    assert names(rank_units(config(EMBEDDED, LOCAL, SPREAD, ADOPTED), node)) == expected


def test_a_vllm_rank_runs_below_a_guard_with_its_own_environment() -> None:
    (unit,) = rank_units(config(LOCAL), None)
    second = unit.processes[1]
    assert second.command[:8] == (
        sys.executable, "-P", "-m", "vllm_ranks.launcher.guard", "--", "vllm", "serve", "m"
    )  # fmt: skip
    assert second.environment == {"CUDA_VISIBLE_DEVICES": "1", "A": "1"}
    assert second.ready_url == "http://127.0.0.1:8101/health"
    assert second.is_vllm
    assert unit.group is not None
    assert [rank.name for rank in unit.group.ranks] == ["l/0", "l/1"]


def test_a_units_group_has_only_the_ranks_that_run_here() -> None:
    (unit,) = rank_units(config(SPREAD), 1)
    assert unit.name == "group s on node 1"
    assert unit.serves == "2 ranks on http://10.0.0.2:8100 to :8101"
    assert unit.group is not None
    assert [rank.name for rank in unit.group.ranks] == ["s/2", "s/3"]


def test_ports_are_checked_where_they_are_used() -> None:
    listeners = [(one.host, one.port) for one in rank_listeners(config(SPREAD), 1)]
    assert listeners == [
        ("10.0.0.2", 8100), ("10.0.0.2", 8101),
        ("10.0.0.2", 5559), ("10.0.0.2", 5563), ("10.0.0.2", 5560), ("10.0.0.2", 5564),
    ]  # fmt: skip
    assert ("10.0.0.1", 29550) in [(one.host, one.port) for one in rank_listeners(config(SPREAD), 0)]


def test_a_dry_run_prints_each_machines_commands() -> None:
    assert render_commands(config(EMBEDDED, SPREAD), None, CommandFormat.SHELL) == (
        "# node 0, 10.0.0.1\n" + "".join(spread_line(rank) for rank in (0, 1)) + "\n"
        "# node 0, 127.0.0.1\n"
        "wavegate rank --model wavegate-embedded --host 127.0.0.1 --port 9500 "
        "--max-num-batched-tokens 2048\n\n"
        "# node 1, 10.0.0.2\n" + "".join(spread_line(rank) for rank in (2, 3))
    )


def test_a_dry_run_of_one_machine_prints_nothing_else() -> None:
    assert render_commands(config(EMBEDDED, SPREAD), 1, CommandFormat.SHELL) == (
        "# node 1, 10.0.0.2\n" + "".join(spread_line(rank) for rank in (2, 3))
    )


def spread_line(rank: int) -> str:
    """The command of one rank of the group over two machines."""
    host = f"10.0.0.{1 + rank // 2}"
    return (
        f"CUDA_VISIBLE_DEVICES={rank % 2} vllm serve m --host {host} --port {8100 + rank % 2} "
        f"--data-parallel-size 4 --data-parallel-rank {rank} --data-parallel-external-lb "
        "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29550 --kv-events-config "
        '\'{"enable_kv_cache_events":true,"publisher":"zmq",'
        f'"endpoint":"tcp://[::ffff:{host}]:5557","replay_endpoint":"tcp://{host}:5561"}}\'\n'
    )
