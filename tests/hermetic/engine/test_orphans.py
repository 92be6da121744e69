"""Nothing survives: each parent is killed with SIGKILL, and everything below it must go."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.builders_group import FAST, RankProcess, descendants, eventually, group, is_running, rank
from tests.builders_ports import free_port

GRACE = ("--engine-dead-grace-seconds", "0.2")


def all_gone(pids: list[int]) -> bool:
    return eventually(lambda: not any(map(is_running, pids)), 15)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def family(*ranks: RankProcess) -> list[int]:
    """The processes themselves and everything below them."""
    return [pid for rank in ranks for pid in (rank.process.pid, *descendants(rank.process.pid))]


def test_a_killed_api_server_takes_its_engine_with_it() -> None:
    with rank(*FAST) as served:
        pids = family(served)
        assert len(pids) == 2
        kill(served.process.pid)
        served.process.wait()
        assert all_gone(pids)


def test_a_killed_rank_0_takes_engine_and_coordinator_with_it_and_the_group_down() -> None:
    with group(3, *FAST, *GRACE) as ranks:
        pids = family(*ranks)
        assert len(pids) == 7
        kill(ranks[0].process.pid)
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL, 1, 1]
        assert all_gone(pids)


def test_a_killed_rank_takes_the_group_down() -> None:
    with group(3, *FAST, *GRACE) as ranks:
        pids = family(*ranks)
        kill(ranks[2].process.pid)
        assert [rank.wait() for rank in ranks] == [1, 1, -signal.SIGKILL]
        assert all_gone(pids)


def test_a_killed_engine_ends_its_server_and_the_group() -> None:
    with group(2, *FAST, *GRACE) as ranks:
        pids = family(*ranks)
        (engine,) = ranks[1].engines
        kill(engine)
        assert [rank.wait() for rank in ranks] == [1, 1]
        assert all_gone(pids)
        assert "signal SIGKILL" in ranks[1].log


def test_ranks_outlive_their_coordinator() -> None:
    with group(2, *FAST) as ranks:
        ranks[0].complete()
        (coordinator,) = ranks[0].coordinators
        kill(coordinator)
        assert eventually(lambda: not is_running(coordinator))
        assert [rank.health() for rank in ranks] == [200, 200]


@pytest.mark.parametrize("victim", ["launcher", "api server", "engine", "coordinator"])
def test_with_several_api_servers_any_death_ends_the_launch(victim: str) -> None:
    with rank("-dp", "2", "--api-server-count", "2", *FAST, *GRACE) as served:
        pids = family(served)
        assert len(pids) == 6
        match victim:
            case "launcher":
                kill(served.process.pid)
            case "api server":
                kill(served.children("api_process")[0])
            case "engine":
                kill(served.engines[0])
            case "coordinator":
                kill(served.coordinators[0])
        assert served.wait() in (1, -signal.SIGKILL)
        assert all_gone(pids)


def test_a_killed_headless_launcher_takes_its_engines_with_it() -> None:
    common = ("-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", str(free_port()), *FAST, *GRACE)
    with rank(*common, "--api-server-count", "1", wait=False) as head:
        with rank(*common, "-dpr", "1", "--headless", wait=False) as headless:
            assert eventually(lambda: head.health() == 200, 20), head.log + headless.log
            pids = family(head, headless)
            kill(headless.process.pid)
            headless.process.wait()
            assert head.wait() == 1
        assert all_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_group_leaves_nothing_and_exits_with_0(number: signal.Signals) -> None:
    with group(2, *FAST) as ranks:
        pids = family(*ranks)
        for rank_ in ranks:
            rank_.process.send_signal(number)
        assert ranks[0].wait() == 0
        assert all_gone(pids)


def test_files_of_a_killed_rank_are_removed_by_the_next_one() -> None:
    def files(pid: int) -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"wavegate-rank-{pid}-*"))

    with rank(*FAST) as served:
        pid = served.process.pid
        assert len(files(pid)) == 1
        kill(pid)
        served.process.wait()
        assert len(files(pid)) == 1
    with rank(*FAST) as successor:
        assert files(pid) == []
        pid = successor.process.pid
    assert files(pid) == []


def test_stopping_while_starting_leaves_nothing() -> None:
    with group(2, *FAST, wait=False) as ranks:
        ranks[1].end()
        assert eventually(lambda: bool(ranks[0].coordinators) and bool(ranks[0].engines))
        pids = family(ranks[0])
        ranks[0].process.terminate()
        assert ranks[0].wait() == 0
        assert all_gone(pids)
