"""TLS between Envoy and the gateway, as `wavegate up` sets it up on both sides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from tests.builders_parts import stub_rank
from tests.builders_wavegate import adopted_group, running_wavegate, write_config

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def authority() -> trustme.CA:
    """A certificate authority."""
    return trustme.CA()


def files(folder: Path, name: str, certificate: trustme.LeafCert) -> dict[str, str]:
    """A certificate and its key as files; their paths."""
    cert, key = folder / f"{name}-cert.pem", folder / f"{name}-key.pem"
    cert.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return {"cert": str(cert), "key": str(key)}


async def is_picked_for(folder: Path, envoy: dict[str, Any], tls: dict[str, Any]) -> bool:
    """Whether the gateway places requests that `wavegate up` serves with these TLS settings."""
    async with stub_rank() as rank:
        config = write_config(
            folder, [adopted_group(rank.endpoint)], envoy={"ext_proc_tls": envoy or None}, ext_proc_tls=tls
        )
        url = f"http://127.0.0.1:{config['envoy']['port']}/v1/chat/completions"
        async with running_wavegate(folder, "up") as up, httpx2.AsyncClient(timeout=30) as http:
            await up.says("serving on http://127.0.0.1:")
            admin = f"http://127.0.0.1:{config['gateway']['admin_port']}/status"
            for _ in range(30):  # the first may come before Envoy has connected to the gateway
                assert (await http.post(url, json=CHAT)).status_code == 200
                if (await http.get(admin)).json()["ranks"][0]["picks"]:
                    return True
                await asyncio.sleep(0.1)
            return False


async def test_a_certificate_for_the_gateway_is_all_it_takes(tmp_path: Path, authority: trustme.CA) -> None:
    gateway = files(tmp_path, "gateway", authority.issue_cert("gateway.example"))
    assert await is_picked_for(tmp_path, {}, gateway)


@pytest.mark.parametrize(("name", "is_trusted"), [("gateway.example", True), ("other.example", False)])
async def test_with_an_authority_on_either_side_both_show_certificates(
    tmp_path: Path, authority: trustme.CA, name: str, is_trusted: bool
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    gateway = files(tmp_path, "gateway", authority.issue_cert("gateway.example"))
    of_envoy = files(tmp_path, "envoy", authority.issue_cert("envoy.example"))
    envoy = {"ca": str(ca), "server_names": [name], **of_envoy}
    assert await is_picked_for(tmp_path, envoy, {**gateway, "client_ca": str(ca)}) == is_trusted


async def test_files_are_found_from_where_the_command_runs(tmp_path: Path, authority: trustme.CA) -> None:
    files(tmp_path, "gateway", authority.issue_cert("gateway.example"))
    relative = {"cert": "gateway-cert.pem", "key": "gateway-key.pem"}
    assert await is_picked_for(tmp_path, {}, relative)
