"""The files in `envoy/` at work: the configurations that stand alone, with a real gateway, and the snippets.

Each configuration is what a mode is rendered to; all that a mode does is shown by test_body_modes.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme
import yaml
from aiohttp import web

from tests.builders_envoy import RunningEnvoy, started_envoy
from tests.builders_envoy_files import ENVOY, SAMPLES, content, with_addresses
from tests.builders_modes import connection_manager, http_filter, listener, route
from tests.builders_parts import StubRank, ok, picks, refusing_endpoint, stub_picker, stub_rank
from tests.builders_ports import free_port
from tests.builders_wavegate import WavegateProcess, running_wavegate

CHAT = "/v1/chat/completions"
BODY = b'{"model":"wavegate-embedded","messages":[{"role":"user","content":"Hello"}]}'
MIB = 1 << 20
RANKS = 4
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
FREE, FULL = (0, 0, 0.0), (8, 2, 1.0)
"""What the gauges of a rank say that has room, and of one that has none."""


class Pool:
    """One of the configurations over ranks that answer when told, with a real gateway."""

    def __init__(self, envoy: RunningEnvoy, gateway: WavegateProcess, admin_url: str) -> None:
        self.envoy = envoy
        self.gateway = gateway
        self.ranks: list[StubRank] = []
        self.may_end = asyncio.Event()
        """Until it is set, no answer ends."""
        self.refusing: set[int] = set()
        """Ranks whose queue is full: they answer 503."""
        self.gauges: tuple[float, ...] = FREE
        """What all ranks report."""
        self._admin_url = admin_url

    def client(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None)
        return httpx2.AsyncClient(base_url=self.envoy.url, timeout=30, limits=limits)

    async def reservations(self) -> list[int]:
        """Open reservations, by rank."""
        async with httpx2.AsyncClient(base_url=self._admin_url) as http:
            return [rank["reservations"] for rank in (await http.get("/status")).json()["ranks"]]

    async def held(self) -> int:
        """Requests that wait in the gateway."""
        async with httpx2.AsyncClient(base_url=self._admin_url) as http:
            held: int = (await http.get("/status")).json()["held"]["requests"]
            return held

    async def until_reserved(self, total: int, *, within_s: float) -> None:
        """Wait until so many reservations are open."""
        async with asyncio.timeout(within_s):
            while sum(await self.reservations()) != total:
                await asyncio.sleep(0.01)


StartFile = Callable[[str], AbstractAsyncContextManager[Pool]]


@pytest.fixture
def start_file(tmp_path: Path) -> StartFile:
    """`async with start_file("envoy.yaml") as pool:`: the file with other addresses, its sample's gateway."""

    @asynccontextmanager
    async def start(name: str) -> AsyncIterator[Pool]:
        pool: Pool | None = None

        async def answer(rank: int, request: web.Request) -> web.StreamResponse:
            if request.path == "/metrics":
                values = zip(GAUGES, FREE if pool is None else pool.gauges, strict=True)
                lines = (f'vllm:{name}{{engine="{rank}",model_name="m"}} {value}\n' for name, value in values)
                return web.Response(text="".join(lines))
            assert pool is not None
            if rank in pool.refusing:
                return web.Response(status=503)
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begun")
            await pool.may_end.wait()
            return response

        async with AsyncExitStack() as parts:
            ranks = [
                await parts.enter_async_context(stub_rank(partial(answer, index))) for index in range(RANKS)
            ]
            endpoints = [rank.endpoint for rank in ranks]
            sample = content(f"samples/{SAMPLES[name]}")
            target, admin_port = f"127.0.0.1:{free_port()}", free_port()
            sample["groups"] = [
                {"engine": "adopted", "name": "g0", "model": "wavegate-embedded", "endpoints": endpoints}
            ]
            sample["gateway"] = {"ext_proc_listen": target, "admin_port": admin_port}
            (tmp_path / "wavegate.yaml").write_text(yaml.safe_dump(sample))
            gateway = await parts.enter_async_context(running_wavegate(tmp_path, "gateway"))
            await gateway.says("ready")
            configuration = with_addresses(content(name), endpoints, target)
            envoy = await parts.enter_async_context(started_envoy(configuration, tmp_path))
            pool = Pool(envoy, gateway, f"http://127.0.0.1:{admin_port}")
            pool.ranks = ranks
            yield pool

    return start


of_every_file = pytest.mark.parametrize("name", SAMPLES)


@of_every_file
async def test_requests_are_balanced_and_held_by_their_ranks_until_answers_end(
    start_file: StartFile, name: str
) -> None:
    async with start_file(name) as pool, pool.client() as http:
        requests = [asyncio.create_task(http.post(CHAT, content=BODY)) for _ in range(40)]
        await pool.until_reserved(40, within_s=20)
        reserved = await pool.reservations()
        assert max(reserved) - min(reserved) <= 2
        pool.may_end.set()
        answers = await asyncio.gather(*requests)
        await pool.until_reserved(0, within_s=0.5)
        assert {answer.status_code for answer in answers} == {200}
        served = Counter(answer.headers["x-wavegate-rank"] for answer in answers)
        assert sorted(served) == [f"g0/{index}" for index in range(RANKS)]
        assert sorted(served.values()) == sorted(reserved)


@of_every_file
async def test_a_rank_that_is_full_is_passed_over_for_the_next_of_the_pick(
    start_file: StartFile, name: str
) -> None:
    async with start_file(name) as pool, pool.client() as http:
        pool.may_end.set()
        pool.refusing = {0}
        answers = await asyncio.gather(*(http.post(CHAT, content=BODY) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        endpoints = [rank.endpoint for rank in pool.ranks]
        again = [line for line in await pool.envoy.access_log(20) if line["attempts"] > 1]
        assert again
        for line in again:
            first, second, *_rest = line["picked"].split(",")
            assert (first, line["rank"]) == (endpoints[0], f"g0/{endpoints.index(second)}")


@of_every_file
async def test_requests_that_a_full_rank_has_refused_count_on_the_ranks_that_have_them(
    start_file: StartFile, name: str
) -> None:
    async with start_file(name) as pool, pool.client() as http:
        pool.refusing = {0}
        requests = [asyncio.create_task(http.post(CHAT, content=BODY)) for _ in range(20)]
        async with asyncio.timeout(20):
            while (reserved := await pool.reservations())[0] or sum(reserved) < len(requests):
                await asyncio.sleep(0.01)
        pool.may_end.set()
        answers = await asyncio.gather(*requests)
        served = Counter(answer.headers["x-wavegate-rank"] for answer in answers)
        assert [served[f"g0/{index}"] for index in range(RANKS)] == reserved
        assert {line["attempts"] for line in await pool.envoy.access_log(20)} >= {1, 2}


@of_every_file
async def test_a_request_is_held_for_more_than_a_second_until_a_rank_has_room(
    start_file: StartFile, name: str
) -> None:
    async with start_file(name) as pool, pool.client() as http:
        pool.may_end.set()
        pool.gauges = FULL
        async with asyncio.timeout(20):
            while True:
                started_s = time.monotonic()
                request = asyncio.create_task(http.post(CHAT, content=BODY))
                await asyncio.sleep(0.3)
                if not request.done():
                    break  # the gateway has read it
        assert await pool.held() == 1
        await asyncio.sleep(1.2)
        pool.gauges = FREE
        assert (await request).status_code == 200
        assert time.monotonic() - started_s > 1.5


@of_every_file
async def test_a_client_that_leaves_frees_its_rank(start_file: StartFile, name: str) -> None:
    async with start_file(name) as pool, pool.client() as http:
        async with http.stream("POST", CHAT, content=BODY) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"begun"
            assert sum(await pool.reservations()) == 1
        await pool.until_reserved(0, within_s=0.5)


@of_every_file
async def test_a_body_above_the_limit_is_refused_or_passes_where_nobody_holds_it(
    start_file: StartFile, name: str
) -> None:
    async with start_file(name) as pool, pool.client() as http:
        pool.may_end.set()
        for size, expected in ((15 * MIB, 200), (17 * MIB, 200 if "header-only" in name else 413)):
            content = BODY[:-2] + b" " * size + BODY[-2:]
            answer = await http.post(CHAT, content=content)
            assert answer.status_code == expected
            if expected == 413:
                assert answer.json()["error"]["code"] == "request_too_large"


@of_every_file
async def test_without_the_gateway_envoy_balances_by_itself(start_file: StartFile, name: str) -> None:
    async with start_file(name) as pool, pool.client() as http:
        pool.may_end.set()
        assert (await http.post(CHAT, content=BODY)).status_code == 200
        pool.gateway.process.kill()
        await pool.gateway.exit_status()
        # A full-duplex request that finds out has sent its body away already.
        found_out = (await http.post(CHAT, content=BODY)).status_code
        assert found_out == 200 or (found_out == 500 and "full-duplex" in name)
        answers = [await http.post(CHAT, content=BODY) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.headers["x-wavegate-rank"] for answer in answers}) >= 2


def snippet(name: str, **replaced: str) -> Any:
    """A snippet as data, with parts of its text replaced."""
    text = (ENVOY / "snippets" / f"{name}.yaml").read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return yaml.safe_load(text)


def somebodys_envoy(other: str) -> Any:
    """An Envoy that serves something else already: the least that Envoy starts with."""
    host, _, port = other.rpartition(":")
    address = {"socket_address": {"address": host, "port_value": int(port)}}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "mine",
        "route_config": {"virtual_hosts": [{"name": "mine", "domains": ["*"], "routes": []}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    other_cluster = {
        "name": "other",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "other",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {
            "listeners": [
                {
                    "name": "mine",
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [other_cluster],
        },
    }


async def test_the_snippets_add_wavegate_to_an_envoy_that_serves_something_else(tmp_path: Path) -> None:
    async with AsyncExitStack() as parts:
        other = await parts.enter_async_context(stub_rank())
        dead = [parts.enter_context(refusing_endpoint()) for _ in range(RANKS - 1)]
        rank = await parts.enter_async_context(stub_rank())
        picker = await parts.enter_async_context(stub_picker(dead[0], rank.endpoint))
        configuration = somebodys_envoy(other.endpoint)
        manager = connection_manager(configuration)
        configuration["static_resources"]["clusters"] += snippet("clusters")
        listener(configuration).update(snippet("listener"))
        manager.update(snippet("connection-manager"))
        http_filter(configuration, "router").update(snippet("router"))
        manager["http_filters"][0:0] = snippet("http-filters")
        manager["route_config"]["virtual_hosts"][0].update(snippet("virtual-host"))
        manager["route_config"]["virtual_hosts"][0]["routes"] += [*snippet("other-route"), *snippet("route")]
        with_addresses(configuration, [*dead, rank.endpoint], picker.target)
        envoy = await parts.enter_async_context(started_envoy(configuration, tmp_path))
        async with httpx2.AsyncClient(base_url=envoy.url) as http:
            answer = await http.post(CHAT, content=BODY)
            assert (answer.status_code, answer.headers["x-wavegate-rank"]) == (200, "g0/3")
            assert len(picker.messages) == 1
            for _ in range(3):
                assert "x-wavegate-rank" not in (await http.post("/other", content=BODY)).headers
            assert len(picker.messages) == 1
            assert [received.path for received in other.received] == ["/other"] * 3


@asynccontextmanager
async def envoy_with(
    folder: Path, change: Callable[[Any], None], rank: StubRank
) -> AsyncIterator[tuple[RunningEnvoy, Any]]:
    """envoy.yaml, altered, over one rank that is always picked; and the picker."""
    async with AsyncExitStack() as parts:
        dead = [parts.enter_context(refusing_endpoint()) for _ in range(RANKS - 1)]
        picker = await parts.enter_async_context(stub_picker())
        picker.reply = picks(rank.endpoint)
        configuration = with_addresses(content("envoy.yaml"), [rank.endpoint, *dead], picker.target)
        change(configuration)
        yield await parts.enter_async_context(started_envoy(configuration, folder)), picker


async def test_with_the_snippet_for_api_keys_only_those_who_have_one_are_served(tmp_path: Path) -> None:
    def add_keys(configuration: Any) -> None:
        connection_manager(configuration)["http_filters"][0:0] = snippet("api-keys")
        # What `gateway.admission.tenant_header: x-client-id` asks for.
        http_filter(configuration, "ext_proc")["request_attributes"].append("request.headers['x-client-id']")

    async with (
        stub_rank() as rank,
        envoy_with(tmp_path, add_keys, rank) as (envoy, picker),
        httpx2.AsyncClient(base_url=envoy.url) as http,
    ):
        for key in ({}, {"authorization": "Bearer sk-wrong"}):
            refused = await http.post(CHAT, content=BODY, headers=key)
            assert (refused.status_code, refused.text) == (401, "Client authentication failed.")
        assert rank.received == picker.messages == []
        key = {"authorization": "Bearer sk-replace-this-one-too", "x-client-id": "forged"}
        assert (await http.post(CHAT, content=BODY, headers=key)).status_code == 200
        (received,) = rank.received
        assert received.headers["x-client-id"] == "team-b"
        assert "authorization" not in received.headers
        attributes = picker.messages[0].attributes["envoy.filters.http.ext_proc"]
        assert attributes["request.headers['x-client-id']"] == "team-b"
        dumped = (await http.get(f"{envoy.admin_url}/config_dump")).text
        assert "sk-replace" not in dumped


@pytest.mark.parametrize("http2", [False, True])
async def test_with_the_snippet_for_tls_clients_connect_by_https(tmp_path: Path, http2: bool) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    (tmp_path / "fullchain.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(tmp_path / "privkey.pem"))
    trusts = ssl.create_default_context()
    authority.configure_trust(trusts)

    def add_tls(configuration: Any) -> None:
        files = snippet("listener-tls", **{"/etc/wavegate/tls": str(tmp_path)})
        listener(configuration)["filter_chains"][0].update(files)

    async with (
        stub_rank(ok) as rank,
        envoy_with(tmp_path, add_tls, rank) as (envoy, _),
        httpx2.AsyncClient(
            base_url=envoy.url.replace("http:", "https:"), verify=trusts, http2=http2, http1=not http2
        ) as http,
    ):
        answer = await http.post(CHAT, content=BODY)
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2" if http2 else "HTTP/1.1")


def test_the_route_snippet_takes_all_paths() -> None:
    """So that it comes last; an operator narrows it."""
    assert route(content("envoy.yaml")) == snippet("route")[0]
