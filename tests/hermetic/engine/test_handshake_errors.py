"""Launches that cannot succeed: a clear error each, and every process of the launch gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.builders_group import FAST, RankProcess, descendants, eventually, group, is_running, rank
from tests.builders_ports import free_port

GRACE = ("--engine-dead-grace-seconds", "0.2")


@contextmanager
def launch(*ranks: Sequence[str]) -> Iterator[list[RankProcess]]:
    """Processes with these options, and one handshake port for all of them."""
    common = ("--data-parallel-rpc-port", str(free_port()), *FAST, *GRACE)
    with ExitStack() as stack:
        yield [stack.enter_context(rank(*options, *common, wait=False)) for options in ranks]


def external(index: int, size: int = 2, *more: str) -> tuple[str, ...]:
    return ("--data-parallel-size", str(size), "--data-parallel-rank", str(index), *more)


def all_end_with(code: int, ranks: Sequence[RankProcess]) -> bool:
    """Every process and everything below it is gone, and the exit codes are right."""
    below = [pid for one in ranks for pid in descendants(one.process.pid)]
    codes = [one.wait() for one in ranks]
    return codes == [code] * len(ranks) and eventually(lambda: not any(map(is_running, below)))


def test_ranks_with_different_configurations() -> None:
    with launch(external(0), external(1, 2, "--dp-sync-interval", "8")) as ranks:
        assert all_end_with(1, ranks)
        assert "Configuration mismatch detected for engine 1." in ranks[0].log
        assert "Connection closed by peer" in ranks[1].log


def test_a_rank_the_group_does_not_have() -> None:
    with launch(external(0), external(2, 3, "--handshake-timeout-seconds", "2")) as ranks:
        assert all_end_with(1, ranks)
        assert "Message from engine with unexpected data parallel rank: 2" in ranks[0].log


def test_the_same_rank_twice() -> None:
    timeout = ("--handshake-timeout-seconds", "3")
    with launch(external(0, 3), external(1, 3, *timeout), external(1, 3, *timeout)) as ranks:
        assert all_end_with(1, ranks)
        assert "Unexpected HELLO message for remote engine 1 in CONNECTED state." in ranks[0].log


def test_rank_0_twice() -> None:
    rpc_port = free_port()
    options = (*external(0), "--data-parallel-rpc-port", str(rpc_port), *FAST)
    with rank(*options, wait=False) as first:
        assert eventually(lambda: bool(first.engines))
        with rank(*options, wait=False) as second:
            assert all_end_with(1, [second])
            assert f"cannot listen for the engines' handshake on tcp://127.0.0.1:{rpc_port}" in second.log


def test_a_headless_engine_in_an_external_group() -> None:
    headless = ("-dp", "2", "-dpl", "1", "-dpr", "1", "--headless", "--handshake-timeout-seconds", "2")
    with launch(external(0), headless) as ranks:
        assert all_end_with(1, ranks)
        assert "Remote engine 1 must not use --headless in external or hybrid dp lb mode" in ranks[0].log


def test_an_external_rank_in_an_internal_group() -> None:
    head = ("-dp", "2", "-dpl", "1", "--api-server-count", "1")
    with launch(head, external(1, 2, "--handshake-timeout-seconds", "2")) as ranks:
        assert all_end_with(1, ranks)
        assert "Remote engine 1 must use --headless unless in external or hybrid dp lb mode" in ranks[0].log


def test_no_rank_0() -> None:
    with launch(external(1, 2, "--handshake-timeout-seconds", "1")) as ranks:
        assert all_end_with(1, ranks)
        assert "Did not receive response from front-end process within 1 seconds" in ranks[0].log
        assert "Engine core initialization failed" in ranks[0].log


def test_the_default_handshake_timeout_reads_like_vllms() -> None:
    with launch(external(1, 2, "--handshake-timeout-seconds", "60")) as (waiting,):
        assert eventually(lambda: bool(waiting.engines))
        assert waiting.process.poll() is None


def test_a_rank_whose_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with rank("--port", str(port), wait=False) as refused:
            assert all_end_with(1, [refused])
            assert f"cannot listen on 127.0.0.1:{port}" in refused.log


def test_contradicting_options() -> None:
    with rank("--data-parallel-size", "4", "--data-parallel-rank", "4", wait=False) as refused:
        assert refused.wait() == 2
        assert "Error: data_parallel_rank (4) must be in the range [0, 4)" in refused.log


def test_an_unknown_option() -> None:
    with rank("--warp-speed", wait=False) as refused:
        assert refused.wait() == 2
        assert "No such option" in refused.log


def test_a_rank_that_comes_late_is_waited_for() -> None:
    with group(2, *FAST, wait=False) as (first, second):
        assert eventually(lambda: first.health() == 200 and second.health() == 200, 20)
