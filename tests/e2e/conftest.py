"""Fixtures of the end-to-end tests: a real Envoy over given ranks, with a given ext_proc service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import pytest

from tests.builders_envoy import RunningEnvoy, envoy_config, running_envoy
from tests.builders_mode_setup import CHAT, NO_GATEWAY, Setup, mode_at_work
from tests.builders_modes import Change, Mode, no_change
from tests.builders_parts import Answer, StubPicker, StubRank, refusing_endpoint, stub_picker, stub_rank

StartEnvoy = Callable[..., AbstractAsyncContextManager[RunningEnvoy]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs Envoy."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def start_envoy(tmp_path_factory: pytest.TempPathFactory) -> StartEnvoy:
    """`async with start_envoy([[endpoint, …], …], ext_proc) as envoy:`, one list of endpoints per group.

    Groups are named g0, g1, …; `envoy_section` are fields of the configuration's section `envoy`. `change`
    alters what was rendered.
    """

    def start(
        groups: Sequence[Sequence[str]],
        ext_proc: str = NO_GATEWAY,
        change: Change = no_change,
        **envoy_section: Any,
    ) -> AbstractAsyncContextManager[RunningEnvoy]:
        config = envoy_config(groups, ext_proc, **envoy_section)
        return running_envoy(config, tmp_path_factory.mktemp("envoy"), change)

    return start


class StubPool:
    """A real Envoy over stand-ins that do as told: ranks g0/0, g0/1, … and a picker."""

    def __init__(self, envoy: RunningEnvoy, ranks: list[StubRank], picker: StubPicker) -> None:
        self.envoy = envoy
        self.ranks = ranks
        self.picker = picker

    def client(self, *, http2: bool = False, **options: Any) -> httpx2.AsyncClient:
        """An HTTP client of the pool, to be closed by the caller."""
        return httpx2.AsyncClient(
            base_url=self.envoy.url, http2=http2, http1=not http2, **{"timeout": 30, **options}
        )

    async def post(self, content: bytes = b"{}", headers: dict[str, str] | None = None) -> httpx2.Response:
        """One chat request on a connection of its own."""
        async with self.client() as http:
            return await http.post(CHAT, content=content, headers=headers)


StartPool = Callable[..., AbstractAsyncContextManager[StubPool]]


@pytest.fixture
def start_pool(start_envoy: StartEnvoy) -> StartPool:
    """`async with start_pool(answer, answer, …) as pool:`, an answer for each rank, None for a dead one.

    The picker picks all ranks in order until told otherwise; `with_picker=False` leaves it out.
    """

    @asynccontextmanager
    async def start(
        *answers: Answer | None, with_picker: bool = True, **envoy_section: Any
    ) -> AsyncIterator[StubPool]:
        async with AsyncExitStack() as parts:
            ranks = []
            for answer in answers:
                if answer is None:
                    rank = StubRank()
                    rank.endpoint = parts.enter_context(refusing_endpoint())
                else:
                    rank = await parts.enter_async_context(stub_rank(answer))
                ranks.append(rank)
            endpoints = [rank.endpoint for rank in ranks]
            picker = await parts.enter_async_context(stub_picker(*endpoints))
            target = picker.target if with_picker else NO_GATEWAY
            envoy = await parts.enter_async_context(start_envoy([endpoints], target, **envoy_section))
            yield StubPool(envoy, ranks, picker)

    return start


StartMode = Callable[..., AbstractAsyncContextManager[Setup]]


@pytest.fixture
def start_mode(tmp_path_factory: pytest.TempPathFactory) -> StartMode:
    """`async with start_mode(mode, answer, answer, …) as setup:`, with what `mode_at_work` understands."""

    def start(mode: Mode, *answers: Any, **options: Any) -> AbstractAsyncContextManager[Setup]:
        return mode_at_work(tmp_path_factory.mktemp("envoy"), mode, *answers, **options)

    return start
