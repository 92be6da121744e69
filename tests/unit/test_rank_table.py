"""The rank table: what is known is shown, what is not known is a dash, and it fits."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ext_proc.vocabulary import Rank
from gateway.rank_table import rank_table
from gateway.status import status
from gateway.status_client import GroupStatus, RankStatus, Status, StatusError, parse_status
from tests.builders import admission, counters, pool, report, request

GROUPS = (GroupStatus("g0", "embedded", True), GroupStatus("g1", "adopted", False))


def rank(name: str, state: str = "fresh", **values: Any) -> RankStatus:
    """One rank's status."""
    return RankStatus(
        rank=name,
        group=name.partition("/")[0],
        endpoint="127.0.0.1:8100",
        model="m",
        state=state,
        **{"reservations": 0, "picks": 0, **values},
    )


def shown(*ranks: RankStatus, width: int = 80) -> list[str]:
    """The lines of the table in a terminal of this width."""
    output = io.StringIO()
    Console(file=output, width=width).print(rank_table(Status("0", ranks, GROUPS), width=width))
    return [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_what_a_rank_said_is_shown() -> None:
    values: dict[str, Any] = {
        "running": 4,
        "waiting": 1200,
        "kv_cache_usage": 0.123,
        "report_age_s": 0.051,
        "wave": 3,
    }
    phases = {"reservations": 17, "queued": 2, "prefilling": 1, "decoding": 14}
    assert shown(rank("g0/0", picks=12, **phases, **values)) == [
        "rank state running waiting KV use reserved report age wave picks",
        "g0/0 fresh 4 1,200 12.3% 2/1/14 51 ms 3 12",
        "reserved: queued/prefilling/decoding",
    ]


def test_reservations_that_nobody_observes_are_told_apart() -> None:
    (_, line, _) = shown(rank("group-0/12", reservations=15, unobserved=12, picks=123))
    assert line == "group-0/12 fresh – – – 15 (12 unseen) – – 123"


def test_what_is_not_known_is_a_dash_not_a_zero() -> None:
    assert shown(rank("g0/0", "unknown"))[1] == "g0/0 unknown – – – 0/0/0 – – 0"


def test_ranks_of_a_group_that_is_out_say_so() -> None:
    lines = shown(rank("g0/0"), rank("g1/0", "down"), rank("g1/1"))
    assert [line.split(" –")[0] for line in lines[1:-1]] == ["g0/0 fresh", "", "g1/0 down", "g1/1 group out"]


def test_addresses_are_shown_where_there_is_room() -> None:
    assert "127.0.0.1:8100" in shown(rank("g0/0"), width=120)[1]


def test_nothing_is_cut_at_80_columns() -> None:
    values: dict[str, Any] = {
        "running": 256,
        "waiting": 9999,
        "kv_cache_usage": 1.0,
        "report_age_s": 99.9,
        "wave": 99999,
    }
    phases = {"reservations": 9999, "queued": 5000, "prefilling": 1, "decoding": 4998}
    assert "…" not in "".join(shown(rank("g10/15", picks=999_999, **phases, **values)))


def test_the_gateway_s_own_status_is_understood() -> None:
    from gateway.config import Config

    config = Config.model_validate(
        {"groups": [{"engine": "embedded", "name": "g0", "data_parallel_size": 2}]}
    )
    ledger = pool([Rank("g0", 0, "127.0.0.1:8100"), Rank("g0", 1, "127.0.0.1:8101")])
    for _ in range(3):
        ledger.reserve(Rank("g0", 0, "127.0.0.1:8100"), request(prompt_tokens=50_000), 0.4)
    ledger.record_report(Rank("g0", 0, "127.0.0.1:8100"), report(0.0, counters=counters()))
    ledger.record_report(Rank("g0", 0, "127.0.0.1:8100"), report(0.5, counters=counters(first_tokens=1)))
    read = parse_status(msgspec.json.encode(status(config, ledger, admission(ledger), 0.5)))
    assert [one.rank for one in read.ranks] == ["g0/0", "g0/1"]
    assert [one.report_age_s for one in read.ranks] == [0.0, 0.5]
    assert [(one.queued, one.prefilling, one.decoding) for one in read.ranks] == [(1, 1, 1), (0, 0, 0)]
    assert [(one.name, one.engine, one.healthy) for one in read.groups] == [("g0", "embedded", True)]


def test_anything_else_is_refused() -> None:
    with pytest.raises(StatusError, match="this is not a gateway's status"):
        parse_status(b'{"ranks": 3}')
