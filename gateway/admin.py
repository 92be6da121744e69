"""The admin HTTP API of the gateway: `/status`, `/metrics`, `/livez`, `/readyz`, and what others add.

Reads the ledger, changes nothing. Bound to loopback unless the configuration says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ext_proc.admission import Admission
from ext_proc.ledger import Ledger
from gateway.config import Config
from gateway.status import status
from gateway.telemetry import Telemetry


def admin_app(
    config: Config,
    ledger: Ledger,
    admission: Admission,
    telemetry: Telemetry,
    is_ready: Callable[[], bool],
    further_routes: Sequence[web.RouteDef],
) -> web.Application:
    """The admin API as an aiohttp application."""

    async def get_status(_request: web.Request) -> web.Response:
        body = msgspec.json.encode(status(config, ledger, admission, time.monotonic()))
        return web.Response(body=body, content_type="application/json")

    async def get_metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(telemetry.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def get_livez(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def get_readyz(_request: web.Request) -> web.Response:
        if is_ready():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="not ready: starting or draining\n")

    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(
        [
            web.get("/status", get_status),
            web.get("/metrics", get_metrics),
            web.get("/livez", get_livez),
            web.get("/readyz", get_readyz),
            *further_routes,
        ]
    )
    return app
