"""The admin API's secret: what asks for it, who shows it, and that it is never shown to anybody else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from gateway.admin_token import AdminTokenError, read_token
from gateway.cli import main
from gateway.gateway_groups import GatewayGroups
from tests.builders_gateway import Gateway, running_gateway
from tests.builders_ranks import StandInRank

TOKEN = "0123456789abcdef0123456789abcdef"
OUT = {"in_rotation": False, "reason": "maintenance"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """As `openssl rand -hex 32` writes it, but shorter."""
    path = tmp_path / "admin-token"
    path.write_text(f"{TOKEN}\n")
    return path


RunGuarded = Callable[[StandInRank], AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def run_guarded(token_file: Path, unused_tcp_port_factory: Callable[[], int]) -> RunGuarded:
    """`async with run_guarded(rank) as gateway:` whose admin API asks for the secret."""

    def run(rank: StandInRank) -> AbstractAsyncContextManager[Gateway]:
        groups: list[dict[str, Any]] = [
            {"name": "g0", "engine": "adopted", "model": "m", "endpoints": [rank.endpoint]}
        ]
        return running_gateway(groups, unused_tcp_port_factory, {"admin_token_file": str(token_file)})

    return run


async def asked(
    gateway: Gateway, method: str, path: str, authorization: str | None = None, **body: Any
) -> int:
    """The status of the answer."""
    headers = {} if authorization is None else {"authorization": authorization}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, gateway.admin_url + path, headers=headers, **body) as answer,
    ):
        return answer.status


async def is_in_rotation(gateway: Gateway) -> bool:
    """Whether the group gets requests."""
    state: dict[str, Any] = await (await gateway.get("/groups/g0")).json()
    return bool(state["in_rotation"])


async def test_whatever_does_more_than_read_asks_for_the_secret(run_guarded: RunGuarded) -> None:
    async with StandInRank() as rank, run_guarded(rank) as gateway:
        listed = (await (await gateway.get("/there-is-no-such-path")).text()).splitlines()[1:]
        routes = [line.replace("{name}", "g0").split() for line in listed]
        assert {method for method, _ in routes} == {"GET", "POST", "PUT"}
        for method, path in routes:
            bare = await asked(gateway, method, path, json=OUT)
            shown = await asked(gateway, method, path, f"Bearer {TOKEN}", json=OUT)
            assert (bare, shown) == (200 if method == "GET" else 401, 200), path
        assert await asked(gateway, "DELETE", "/groups/g0") == 401


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}0",
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer ä" * 9,
    ],
)
async def test_another_secret_changes_nothing(run_guarded: RunGuarded, shown: str) -> None:
    async with StandInRank() as rank, run_guarded(rank) as gateway:
        assert await asked(gateway, "PUT", "/groups/g0/rotation", shown, json=OUT) == 401
        assert await is_in_rotation(gateway)


async def test_a_large_body_is_refused_unread(run_guarded: RunGuarded) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    async with StandInRank() as rank, run_guarded(rank) as gateway:
        try:
            assert await asked(gateway, "POST", "/explain", data=endless()) == 401
        except aiohttp.ClientError:
            pass  # the connection was closed while more was being sent
    assert sent < 32 << 20


async def test_a_supervisor_that_has_the_secret_is_obeyed(run_guarded: RunGuarded) -> None:
    async with StandInRank() as rank, run_guarded(rank) as gateway:
        groups = GatewayGroups(gateway.admin_url, "supervisor", TOKEN)
        async with groups.talking():
            assert await groups.take_out("g0", "a rank was lost")
            assert not await is_in_rotation(gateway)
            assert await groups.bring_back("g0")
            assert await is_in_rotation(gateway)


@pytest.mark.parametrize("token", [None, TOKEN[::-1]])
async def test_one_that_has_not_says_so_once(
    run_guarded: RunGuarded, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with StandInRank() as rank, run_guarded(rank) as gateway:
        groups = GatewayGroups(gateway.admin_url, "supervisor", token)
        async with groups.talking():
            for _ in range(3):
                assert not await groups.take_out("g0", "a rank was lost")
        assert await is_in_rotation(gateway)
    told = [record.getMessage() for record in caplog.records if "401" in record.getMessage()]
    assert len(told) == 1
    assert "gateway.admin_token_file must be the same here and there" in told[0]


async def test_the_secret_is_shown_nowhere(run_guarded: RunGuarded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with StandInRank() as rank, run_guarded(rank) as gateway:
        await asked(gateway, "PUT", "/groups/g0/rotation", f"Bearer {TOKEN}", data=b"nonsense")
        await asked(gateway, "PUT", "/groups/g0/rotation", f"Bearer {TOKEN}x", data=b"nonsense")
        pages = [await (await gateway.get(path)).text() for path in ("/status", "/metrics", "/groups", "/no")]
    assert TOKEN not in "".join((caplog.text, *pages))


# --- The file -----------------------------------------------------------------------------------------


def test_the_secret_is_the_word_in_the_file(token_file: Path) -> None:
    assert read_token(token_file) == TOKEN
    assert read_token(None) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"two words of some length", b"x" * 1001, b"\xff" * 32, b"a\0" * 16, b"a\n" * 16],
)
def test_a_file_with_anything_else_is_refused_without_quoting_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "admin-token"
    path.write_bytes(content)
    with pytest.raises(AdminTokenError, match="must hold one word of 16 to 1000") as refusal:
        read_token(path)
    assert not content or content.decode("latin-1") not in str(refusal.value)


@pytest.mark.parametrize("command", [["gateway"], ["up"], ["ranks"]], ids=lambda command: command[0])
def test_no_command_starts_without_the_file(
    tmp_path: Path,
    unused_tcp_port_factory: Callable[[], int],
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "groups": [{"engine": "embedded", "name": "g0", "port": unused_tcp_port_factory()}],
        "envoy": {"port": unused_tcp_port_factory(), "admin_port": unused_tcp_port_factory()},
        "gateway": {
            "admin_port": unused_tcp_port_factory(),
            "ext_proc_listen": f"127.0.0.1:{unused_tcp_port_factory()}",
            "admin_token_file": "missing",
        },
    }
    (tmp_path / "wavegate.yaml").write_text(json.dumps(config))
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code != 0
    assert "gateway.admin_token_file: cannot read missing: No such file or directory" in shown.output
