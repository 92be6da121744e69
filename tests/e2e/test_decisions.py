"""What clients see of decisions: headers that steer and explain them, pools by model, order, refusals.

Real Envoy, a real gateway, stand-ins for the ranks that hold their answers as long as a test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import web

from tests.builders_parts import Received, StubRank, stub_rank
from tests.builders_wavegate import running_wavegate, write_config

CHAT = "/v1/chat/completions"
LONG_PROMPT = "word " * 20_000
"""More than a second of prefill, by the step times that a gateway starts from."""


class Says:
    """What a stand-in says of itself, and how long it keeps its answers back."""

    def __init__(self) -> None:
        self.kv_cache_usage = 0.1
        self.waiting = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(
                text='vllm:num_requests_running{engine="0"} 0\n'
                f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}\n'
                f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_cache_usage}\n'
            )
        await self.may_answer.wait()
        return web.json_response({"choices": [{"finish_reason": "length"}]})


class Pool:
    """A running deployment over stand-ins."""

    def __init__(
        self, config: dict[str, Any], http: httpx2.AsyncClient, ranks: list[tuple[StubRank, Says]]
    ) -> None:
        self._url = f"http://127.0.0.1:{config['envoy']['port']}"
        self._admin = f"http://127.0.0.1:{config['gateway']['admin_port']}"
        self._http = http
        self.ranks = [rank for rank, _ in ranks]
        self.says = [says for _, says in ranks]

    async def chat(self, content: str = "hello", *, model: str = "m", **headers: str) -> httpx2.Response:
        """One chat; `_` in a header's name stands for `-`."""
        return await self._http.post(
            self._url + CHAT,
            json={"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4},
            headers={name.replace("_", "-"): value.encode("latin-1") for name, value in headers.items()},
        )

    def started(self, content: str = "hello", **headers: str) -> asyncio.Task[httpx2.Response]:
        """A chat under way."""
        return asyncio.create_task(self.chat(content, **headers))

    def received(self, index: int = 0) -> list[Received]:
        """The chats that arrived at a rank."""
        return [one for one in self.ranks[index].received if one.path == CHAT]

    async def becomes(self, field: str, value: int) -> None:
        """Return once the gateway's status says so."""
        async with asyncio.timeout(10):
            while (await self._http.get(f"{self._admin}/status")).json()["held"][field] != value:
                await asyncio.sleep(0.01)

    async def arrive(self, count: int) -> None:
        """Return once so many chats have arrived at the first rank."""
        async with asyncio.timeout(10):
            while len(self.received()) < count:
                await asyncio.sleep(0.01)

    async def take_out(self, group: str) -> None:
        """Let the group get no more requests."""
        answer = await self._http.put(f"{self._admin}/groups/{group}/rotation", json={"in_rotation": False})
        assert answer.status_code == 200


@asynccontextmanager
async def pool(folder: Path, *groups: dict[str, Any], **gateway: Any) -> AsyncIterator[Pool]:
    """Groups of as many stand-ins as `ranks` says, by default one of one."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=30))
        ranks = []
        described = []
        for number, fields in enumerate(groups or ({},)):
            members = []
            for _ in range(fields.get("ranks", 1)):
                says = Says()
                members.append((await stack.enter_async_context(stub_rank(says)), says))
            ranks += members
            described.append(
                {
                    "engine": "adopted",
                    "name": f"g{number}",
                    "model": "m",
                    "lock_step": False,
                    **{key: value for key, value in fields.items() if key != "ranks"},
                    "endpoints": [rank.endpoint for rank, _ in members],
                }
            )
        config = write_config(folder, described, **gateway)
        up = await stack.enter_async_context(running_wavegate(folder, "up", "-c", "wavegate.yaml"))
        await up.says("serving on http://127.0.0.1:")
        yield Pool(config, http, ranks)


async def test_a_client_that_asks_sees_why_its_request_went_where_it_went(tmp_path: Path) -> None:
    async with pool(tmp_path, {"ranks": 2}) as running:
        told = await running.chat(x_wavegate_explain="1")
        plain = await running.chat()
    assert told.status_code == plain.status_code == 200
    decision = told.headers["x-wavegate-decision"]
    assert decision.startswith(f"rank={told.headers['x-wavegate-rank']} reason=policy held_ms=0; ")
    assert "prefill 0." in decision
    assert "x-wavegate-decision" not in plain.headers


async def test_headers_for_the_gateway_end_there_and_those_of_applications_pass(tmp_path: Path) -> None:
    gateway = {"sessions": {"header": "x-chat"}, "admission": {"tenant_header": "x-team"}}
    async with pool(tmp_path, **gateway) as running:
        await running.chat(
            x_wavegate_priority="3", x_wavegate_tenant="t", x_wavegate_explain="1", x_team="red", x_chat="42"
        )
        (arrived,) = running.received()
    assert not [name for name in arrived.headers if name.startswith("x-wavegate")]
    assert (arrived.headers["x-team"], arrived.headers["x-chat"]) == ("red", "42")


async def test_a_session_stays_where_it_was_while_other_requests_take_turns(tmp_path: Path) -> None:
    async with pool(tmp_path, {"ranks": 3}, sessions={"header": "x-chat"}) as running:
        together = [(await running.chat(str(n), x_chat="one")).headers["x-wavegate-rank"] for n in range(5)]
        apart = [(await running.chat(str(n))).headers["x-wavegate-rank"] for n in range(6)]
    assert len(set(together)) == 1
    assert len(set(apart)) == 3


async def test_each_model_is_asked_of_the_groups_that_serve_it(tmp_path: Path) -> None:
    groups = ({"model": "large", "other_names": ["big"]}, {"model": "small"}, {"model": "small"})
    async with pool(tmp_path, *groups) as running:
        served = {
            model: {(await running.chat(str(n), model=model)).headers["x-wavegate-rank"] for n in range(6)}
            for model in ("large", "big", "small", "unheard of")
        }
    assert served == {
        "large": {"g0/0"},
        "big": {"g0/0"},
        "small": {"g1/0", "g2/0"},
        "unheard of": {"g0/0"},
    }


async def test_the_more_urgent_of_two_that_wait_goes_first(tmp_path: Path) -> None:
    async with pool(tmp_path) as running:
        running.says[0].may_answer.clear()
        first = running.started("first " + LONG_PROMPT)
        await running.arrive(1)
        patient = running.started("patient " + LONG_PROMPT)
        await running.becomes("requests", 1)
        urgent = running.started("urgent " + LONG_PROMPT, x_wavegate_priority="-1")
        await running.becomes("requests", 2)
        running.says[0].may_answer.set()
        answers = await asyncio.gather(first, patient, urgent)
        order = [one.body.partition(b'"content":"')[2].split(b" ")[0] for one in running.received()]
    assert {answer.status_code for answer in answers} == {200}
    assert order == [b"first", b"urgent", b"patient"]


def refusal(answer: httpx2.Response) -> tuple[int, str, str]:
    """Status, reason and type of an answer of the gateway's own; body and header must tell the same."""
    error = answer.json()["error"]
    assert answer.headers["x-wavegate-drop-reason"] == error["code"]
    assert answer.headers["content-type"].startswith("application/json")
    assert error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code, error["code"], error["type"]


async def test_beyond_the_requests_that_may_wait_clients_are_told_to_come_back(tmp_path: Path) -> None:
    async with pool(tmp_path, admission={"max_held_requests": 1}) as running:
        running.says[0].may_answer.clear()
        under_way = [running.started(LONG_PROMPT)]
        await running.arrive(1)
        under_way.append(running.started(LONG_PROMPT))
        await running.becomes("requests", 1)
        refused = await running.chat()
        running.says[0].may_answer.set()
        served = [answer.status_code for answer in await asyncio.gather(*under_way)]
    assert refusal(refused) == (429, "queue_full", "rate_limit_error")
    assert served == [200, 200]


async def test_where_no_rank_has_room_until_the_longest_hold_clients_are_told_so(tmp_path: Path) -> None:
    async with pool(tmp_path, admission={"max_hold_s": 0.5}) as running:
        running.says[0].kv_cache_usage, running.says[0].waiting = 1.0, 2
        async with asyncio.timeout(20):
            while (refused := await running.chat()).status_code == 200:
                pass  # the gateway has not read it yet
        assert refusal(refused) == (503, "saturated", "rate_limit_error")
        running.says[0].kv_cache_usage, running.says[0].waiting = 0.1, 0
        async with asyncio.timeout(20):
            while (await running.chat()).status_code != 200:
                pass


async def test_without_a_group_in_rotation_clients_are_told_to_come_back(tmp_path: Path) -> None:
    async with pool(tmp_path, {"model": "m"}, {"model": "other"}) as running:
        await running.take_out("g0")
        refused = await running.chat(model="m")
        served = await running.chat(model="other")
    assert refusal(refused) == (503, "no_rank", "server_error")
    assert served.status_code == 200


async def test_headers_that_make_no_sense_are_no_fault(tmp_path: Path) -> None:
    async with pool(tmp_path, sessions={"header": "x-chat"}) as running:
        for value in ("", "soon", "1e3", "9" * 30, "x" * 5000):
            answer = await running.chat(
                x_wavegate_priority=value, x_wavegate_tenant=value, x_chat=value, x_wavegate_explain=value
            )
            assert answer.status_code == 200
            assert ("x-wavegate-decision" in answer.headers) == bool(value)
        unreadable = await running.chat(x_wavegate_tenant="\xff")
        assert unreadable.status_code == 400
        assert unreadable.json()["error"]["code"] == "malformed_header"
