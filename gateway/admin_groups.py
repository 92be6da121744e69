"""The admin API's `/groups`: what is wrong with a group, and `PUT /groups/{name}/rotation` to take it out.

For operators, and for the supervisors that restart groups. Bound to loopback unless the configuration says
otherwise; what it is sent is bounded.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ext_proc.ledger import Ledger
from gateway.group_monitor import GroupMonitor
from gateway.rotation import Rotation, TooManyHolders

OPERATOR = "operator"


class RotationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `PUT /groups/{name}/rotation`."""

    in_rotation: bool
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""
    """Why the group is taken out; for people."""
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = OPERATOR
    """Who says so. A group is in rotation when nobody keeps it out."""


def group_state(name: str, ledger: Ledger, rotation: Rotation, monitor: GroupMonitor) -> dict[str, Any]:
    """One group as plain data."""
    trouble = monitor.trouble(name)
    return {
        "name": name,
        "in_rotation": rotation.is_in(name),
        "held_out_by": rotation.held_out_by(name),
        "trouble": None
        if trouble is None
        else {
            "verdict": trouble.verdict.value,
            "rank": trouble.rank.name,
            "for_s": round(time.monotonic() - trouble.since_s, 3),
            "reason": trouble.reason,
        },
        "reservations": sum(
            account.reservations for account in ledger.accounts if account.rank.group == name
        ),
    }


def group_routes(ledger: Ledger, rotation: Rotation, monitor: GroupMonitor) -> list[web.RouteDef]:
    """The routes below `/groups`."""

    def name_of(request: web.Request) -> str:
        name = request.match_info["name"]
        if name not in rotation:
            raise web.HTTPNotFound(text=f"there is no group {name!r}\n")
        return name

    def answer(data: Any) -> web.Response:
        return web.Response(body=msgspec.json.encode(data), content_type="application/json")

    async def get_groups(_request: web.Request) -> web.Response:
        return answer([group_state(group.name, ledger, rotation, monitor) for group in ledger.groups])

    async def get_group(request: web.Request) -> web.Response:
        return answer(group_state(name_of(request), ledger, rotation, monitor))

    async def put_rotation(request: web.Request) -> web.Response:
        name = name_of(request)
        try:
            wanted = msgspec.json.decode(await request.read(), type=RotationRequest)
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(
                text=f'{error}; send e.g. {{"in_rotation": false, "reason": "maintenance"}}\n'
            ) from None
        if wanted.in_rotation:
            rotation.bring_back(name, wanted.by)
        else:
            try:
                rotation.take_out(name, wanted.by, wanted.reason)
            except TooManyHolders as error:
                raise web.HTTPConflict(text=f"{error}\n") from None
        return answer(group_state(name, ledger, rotation, monitor))

    return [
        web.get("/groups", get_groups),
        web.get("/groups/{name}", get_group),
        web.put("/groups/{name}/rotation", put_rotation),
    ]
