"""The admin HTTP API of the gateway: `/status`, `/metrics`, `/livez`, `/readyz`, and what others add.

Reads the ledger, changes nothing. Bound to loopback unless the configuration says otherwise; what changes
something can ask for a secret (`admin_token`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
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
    guards: Sequence[Middleware] = (),
) -> web.Application:
    """The admin API as an aiohttp application; `guards` see a request first."""

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

    @web.middleware
    async def tell_routes(request: web.Request, handler: Handler) -> web.StreamResponse:
        if isinstance(request.match_info.http_exception, web.HTTPNotFound):
            routes = (
                f"{route.method} {route.resource.canonical}"
                for route in request.app.router.routes()
                if route.resource is not None and route.method != hdrs.METH_HEAD
            )
            return web.Response(
                status=404, text="there is no such path; there are:\n" + "\n".join(routes) + "\n"
            )
        return await handler(request)

    app = web.Application(client_max_size=64 * 1024, middlewares=[*guards, tell_routes])
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
