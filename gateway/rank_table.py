"""Renders the rank table for a terminal; `wavegate status` and `wavegate demo` show the same one.

Pure: status in, table out.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from gateway.status_client import RankStatus, Status

UNKNOWN = "–"
WIDTH_WITH_ADDRESSES = 100
CAPTION = "reserved: queued/prefilling/decoding"
STATE_STYLES = {"fresh": "green", "stale": "yellow", "unknown": "dim", "down": "bold red"}
RIGHT_ALIGNED = ("running", "waiting", "KV use", "reserved", "report age", "wave", "picks")


def rank_table(status: Status, *, width: int) -> Table:
    """One line for each rank, a gap between groups; addresses only where `width` columns have room."""
    has_room = width >= WIDTH_WITH_ADDRESSES
    table = Table(
        box=None,
        header_style="bold",
        padding=(0, 2 if has_room else 1, 0, 0),
        caption=CAPTION,
        caption_justify="left",
    )
    table.add_column("rank", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=9)
    for name in RIGHT_ALIGNED:
        table.add_column(name, justify="right", no_wrap=True)
    if has_room:
        table.add_column("address", no_wrap=True)
    healthy = {group.name: group.healthy for group in status.groups}
    previous: str | None = None
    for rank in status.ranks:
        if previous is not None and rank.group != previous:
            table.add_row()
        previous = rank.group
        cells = _cells(rank, healthy.get(rank.group, True))
        table.add_row(*cells, *([rank.endpoint] if has_room else []))
    return table


def _cells(rank: RankStatus, is_group_healthy: bool) -> list[str | Text]:
    state = rank.state if is_group_healthy or rank.state == "down" else "group out"
    return [
        rank.rank,
        Text(state, style=STATE_STYLES.get(rank.state, "")),
        _number(rank.running),
        _number(rank.waiting),
        UNKNOWN if rank.kv_cache_usage is None else f"{rank.kv_cache_usage:.1%}",
        _reserved(rank),
        UNKNOWN if rank.report_age_s is None else _age(rank.report_age_s),
        _number(rank.wave),
        f"{rank.picks:,}",
    ]


def _reserved(rank: RankStatus) -> str:
    if rank.unobserved:
        return f"{rank.reservations} ({rank.unobserved} unseen)"
    return f"{rank.queued}/{rank.prefilling}/{rank.decoding}"


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
