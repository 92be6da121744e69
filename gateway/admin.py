"""The admin HTTP API of the gateway: `/status`, `/metrics`, `/livez`, `/readyz`, and what others add.

Reads the ledger, changes nothing. Bound to loopback unless the configuration says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ext_proc.ledger import Ledger
from gateway import __version__
from gateway.config import Config
from gateway.telemetry import Telemetry


def status(config: Config, ledger: Ledger, now_s: float) -> dict[str, Any]:
    """The rank table as plain data; what is not known is null."""
    models = {group.name: group.model for group in config.groups}
    engines = {group.name: group.engine for group in config.groups}
    return {
        "version": __version__,
        "groups": [
            {
                "name": group.name,
                "engine": engines[group.name],
                "healthy": group.is_healthy and group.in_rotation,
                "lock_step": group.lock_step,
                "decode_step_ms": round(group.decode_step_s * 1e3, 2),
                "prefill_step_ms": round(group.prefill_step_s * 1e3, 2),
                "budget_tokens": round(group.times.budget_tokens),
                "is_prefilling": group.is_prefilling,
                "lead_tokens": round(group.lead.tokens, 1),
            }
            for group in ledger.groups
        ],
        "ranks": [
            {
                "rank": account.rank.name,
                "group": account.rank.group,
                "index": account.rank.index,
                "endpoint": account.rank.endpoint,
                "model": models[account.rank.group],
                "state": ledger.state(account, now_s).value,
                "running": account.report.running if account.report else None,
                "waiting": account.report.waiting if account.report else None,
                "kv_cache_usage": account.report.kv_cache_usage if account.report else None,
                "wave": account.report.wave if account.report else None,
                "report_age_s": round(now_s - account.report.taken_at_s, 3) if account.report else None,
                "reservations": account.reservations,
                "unobserved": len(account.unobserved),
                "picks": account.picks,
            }
            for account in ledger.accounts
        ],
    }


def admin_app(
    config: Config,
    ledger: Ledger,
    telemetry: Telemetry,
    is_ready: Callable[[], bool],
    further_routes: Sequence[web.RouteDef],
) -> web.Application:
    """The admin API as an aiohttp application."""

    async def get_status(_request: web.Request) -> web.Response:
        body = msgspec.json.encode(status(config, ledger, time.monotonic()))
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
