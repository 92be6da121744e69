"""A stand-in for a rank's HTTP server where a test needs full control over what the rank says."""

from __future__ import annotations

from typing import Self

from aiohttp import web


class StandInRank:
    """`/metrics` and `/health` of a rank, with settable gauges."""

    def __init__(self, *, engine: int = 0) -> None:
        self.engine = engine
        self.running = 0
        self.waiting = 0
        self.kv_cache_usage = 0.0
        self.broken = False
        """Answer 500 everywhere."""
        self.endpoint = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics), web.get("/health", self._health)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=500 if self.broken else 200)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=500)
        labels = f'{{engine="{self.engine}",model_name="m"}}'
        return web.Response(
            text=f"vllm:num_requests_running{labels} {self.running}\n"
            f"vllm:num_requests_waiting{labels} {self.waiting}\n"
            f"vllm:kv_cache_usage_perc{labels} {self.kv_cache_usage}\n"
        )
