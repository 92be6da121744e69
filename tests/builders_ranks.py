"""A stand-in for a rank's HTTP server where a test needs full control over what the rank says."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from aiohttp import web


class StandInRank:
    """`/metrics` and `/health` of a rank, with settable gauges, and an answer to every completion."""

    def __init__(self, *, engine: int = 0) -> None:
        self.engine = engine
        self.running = 0
        self.waiting = 0
        self.kv_cache_usage = 0.0
        self.engine_steps: int | None = None
        """Counter of steps; None: not told."""
        self.broken = False
        """Answer 500 everywhere."""
        self.health_status = 200
        self.completion_status = 200
        self.completions_asked = 0
        self.completion: dict[str, Any] | None = {"choices": [{"finish_reason": "length"}]}
        """Answer to a completion; None: it never comes."""
        self.endpoint = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
                web.post("/v1/completions", self._complete),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=500 if self.broken else self.health_status)

    async def _complete(self, _request: web.Request) -> web.Response:
        self.completions_asked += 1
        while self.completion is None:
            await asyncio.sleep(0.01)
        status = 500 if self.broken else self.completion_status
        return web.json_response(self.completion, status=status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=500)
        labels = f'{{engine="{self.engine}",model_name="m"}}'
        steps = self.engine_steps
        told_steps = "" if steps is None else f"vllm:iteration_tokens_total_count{labels} {steps}\n"
        return web.Response(
            text=f"{told_steps}vllm:num_requests_running{labels} {self.running}\n"
            f"vllm:num_requests_waiting{labels} {self.waiting}\n"
            f"vllm:kv_cache_usage_perc{labels} {self.kv_cache_usage}\n"
        )
