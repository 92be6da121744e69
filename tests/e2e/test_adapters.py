"""Requests for a LoRA adapter gather where it runs: real embedded ranks, a real gateway and Envoy.

What the ranks run shows in nothing but their own `vllm:lora_requests_info`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.builders_wavegate import embedded_group, running_wavegate, write_config

POET, CLERK = "poet", "clerk"
WITH_ADAPTERS = ["--enable-lora", "--max-loras", "2"]
WITH_ADAPTERS += ["--lora-modules", f"{POET}=/adapters/poet", "--lora-modules", f"{CLERK}=/adapters/clerk"]
COMPLETIONS = "/v1/completions"
ENDLESS = {"max_tokens": 4000, "stream": True}
"""More than a minute of steps."""


class Pool:
    """A running deployment."""

    def __init__(self, config: dict[str, Any], http: httpx2.AsyncClient, stack: AsyncExitStack) -> None:
        self._url = f"http://127.0.0.1:{config['envoy']['port']}"
        self._admin = f"http://127.0.0.1:{config['gateway']['admin_port']}"
        self._http = http
        self._stack = stack

    async def ask(self, model: str) -> httpx2.Response:
        """A short request, answered whole."""
        body = {"model": model, "prompt": "hello", "max_tokens": 2}
        return await self._http.post(self._url + COMPLETIONS, json=body, headers={"x-wavegate-explain": "1"})

    async def asked(self, model: str, count: int = 6) -> set[tuple[str, str]]:
        """Which ranks served so many short requests, one after the other, and for which reasons."""
        answers = [await self.ask(model) for _ in range(count)]
        assert {answer.status_code for answer in answers} == {200}
        return {(answer.headers["x-wavegate-rank"], reason(answer)) for answer in answers}

    async def keep_running(self, model: str, endpoint: str | None = None) -> str:
        """Start a request that does not end before the test does; the rank, once the gateway sees it run.

        It goes through Envoy, or past it to one rank.
        """
        url = self._url if endpoint is None else f"http://{endpoint}"
        body = {"model": model, "prompt": "hello", **ENDLESS}
        answer = await self._stack.enter_async_context(
            self._http.stream("POST", url + COMPLETIONS, json=body)
        )
        assert answer.status_code == 200
        async with asyncio.timeout(20):
            while not (found := await self.running(model)):
                await asyncio.sleep(0.02)
        (rank,) = found
        return rank

    async def running(self, adapter: str) -> set[str]:
        """The ranks that run an adapter, by the gateway's status."""
        return {row["rank"] for row in await self._rows() if adapter in row["adapters"]}

    async def endpoint(self, rank: str) -> str:
        """The address of a rank."""
        return next(str(row["endpoint"]) for row in await self._rows() if row["rank"] == rank)

    async def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self._http.get(f"{self._admin}/status")).json()["ranks"]
        return rows


def reason(answer: httpx2.Response) -> str:
    """Why a request went where it went."""
    return str(answer.headers["x-wavegate-decision"].partition("reason=")[2].split()[0])


@asynccontextmanager
async def pool(folder: Path, *groups: dict[str, Any], **gateway: Any) -> AsyncIterator[Pool]:
    """`wavegate up` over these groups, called g0, g1, …"""
    named = [{**fields, "name": f"g{number}"} for number, fields in enumerate(groups)]
    config = write_config(folder, named, **gateway)
    async with (
        running_wavegate(folder, "up", "-c", "wavegate.yaml") as up,
        httpx2.AsyncClient(timeout=30) as http,
        AsyncExitStack() as stack,
    ):
        await up.says("serving on http://127.0.0.1:")
        yield Pool(config, http, stack)


async def test_requests_for_an_adapter_gather_on_the_rank_that_runs_it(tmp_path: Path) -> None:
    async with pool(tmp_path, embedded_group(4, model="base", args=WITH_ADAPTERS)) as running:
        poets, clerks = await running.keep_running(POET), await running.keep_running(CLERK)
        assert poets != clerks
        assert await running.asked(POET) == {(poets, "adapter")}
        assert await running.asked(CLERK) == {(clerks, "adapter")}
        elsewhere = await running.asked("base")
    assert {why for _, why in elsewhere} == {"policy"}
    assert {poets, clerks}.isdisjoint(rank for rank, _ in elsewhere)


async def test_they_gather_across_the_groups_of_a_model(tmp_path: Path) -> None:
    groups = [embedded_group(2, model="base", args=WITH_ADAPTERS) for _ in range(2)]
    async with pool(tmp_path, *groups) as running:
        poets, clerks = await running.keep_running(POET), await running.keep_running(CLERK)
        assert poets.split("/")[0] != clerks.split("/")[0]
        assert await running.asked(POET) == {(poets, "adapter")}
        assert await running.asked(CLERK) == {(clerks, "adapter")}


async def test_once_nothing_of_an_adapter_runs_its_requests_go_anywhere(tmp_path: Path) -> None:
    async with pool(tmp_path, embedded_group(2, model="base", args=WITH_ADAPTERS)) as running:
        await running.asked(POET, count=1)
        async with asyncio.timeout(20):
            while await running.running(POET):
                await asyncio.sleep(0.02)
        served = await running.ask(POET)
    assert reason(served) == "policy"


async def test_a_bound_of_nothing_keeps_requests_from_waiting_for_their_adapter(tmp_path: Path) -> None:
    group = embedded_group(2, model="base", args=WITH_ADAPTERS)
    async with pool(tmp_path, group, adapters={"bound_ms": 0}) as running:
        poets = await running.keep_running(POET)
        ((rank, why),) = await running.asked(POET, count=1)
    assert (rank != poets, why) == (True, "policy")


async def test_an_adapter_that_the_configuration_names_is_asked_of_its_group(tmp_path: Path) -> None:
    """The first group serves the same model without it, and would answer 404."""
    groups = (
        embedded_group(2, model="base"),
        embedded_group(2, model="base", other_names=[POET], args=WITH_ADAPTERS),
    )
    async with pool(tmp_path, *groups) as running:
        assert {rank.split("/")[0] for rank, _ in await running.asked("base")} == {"g0", "g1"}
        assert {rank.split("/")[0] for rank, _ in await running.asked(POET)} == {"g1"}
        poets = await running.keep_running(POET)
        assert await running.asked(POET) == {(poets, "adapter")}


async def test_an_adapter_seen_on_a_rank_of_another_model_is_no_longer_asked_of_the_default_pool(
    tmp_path: Path,
) -> None:
    groups = (embedded_group(2, model="large"), embedded_group(2, model="small", args=WITH_ADAPTERS))
    async with pool(tmp_path, *groups) as running:
        unknown = await running.ask(POET)
        assert (unknown.status_code, unknown.headers["x-wavegate-rank"].split("/")[0]) == (404, "g0")
        assert await running.keep_running(POET, await running.endpoint("g1/1")) == "g1/1"
        assert await running.asked(POET) == {("g1/1", "adapter")}
        assert {rank.split("/")[0] for rank, _ in await running.asked("large")} == {"g0"}
