"""A whole gateway in the event loop of the test, over groups that were there before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from gateway.config import Config
from gateway.server import GatewayServer
from tests.hermetic.conftest import ExtProcClient


class Gateway:
    """A running gateway seen from outside."""

    def __init__(self, config: Config, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.admin_url = f"http://127.0.0.1:{config.gateway.admin_port}"
        self.client = ExtProcClient(config.gateway.ext_proc_listen)
        self.stop = asyncio.Event()
        self.serving = asyncio.create_task(GatewayServer(config).serve(self.stop))

    async def get(self, path: str) -> aiohttp.ClientResponse:
        return await self._http.get(self.admin_url + path)

    async def post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        return await self._http.post(self.admin_url + path, data=body, headers=headers)

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await (await self.get("/status")).json()
        return answer

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which `condition` holds."""
        async with asyncio.timeout(10):
            while True:
                status = await self.status()
                if condition(status):
                    return status
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_gateway(
    groups: list[dict[str, Any]],
    free_port: Callable[[], int],
    gateway_settings: dict[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Gateway]:
    """Serve `groups`, with further settings, from when the gateway is ready until it has drained."""
    config = Config.model_validate(
        {
            "groups": groups,
            "gateway": {
                "admin_port": free_port(),
                "ext_proc_listen": f"127.0.0.1:{free_port()}",
                "reports": {"interval_s": 0.02},
                **(gateway_settings or {}),
            },
            **sections,
        }
    )
    async with aiohttp.ClientSession() as http:
        gateway = Gateway(config, http)
        try:
            async with asyncio.timeout(10):
                while True:
                    try:
                        if (await gateway.get("/readyz")).status == 200:
                            break
                    except aiohttp.ClientConnectorError:
                        pass
                    if gateway.serving.done():
                        await gateway.serving
                    await asyncio.sleep(0.01)
            yield gateway
        finally:
            gateway.stop.set()
            await gateway.client.channel.close()
            await gateway.serving
