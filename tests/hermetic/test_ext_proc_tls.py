"""TLS on the ext_proc listener: who may connect, and what a wrong file says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from ext_proc.service import TlsFiles
from tests.builders import balancer, pool
from tests.builders_protocol import REQ, ROUTE, A, canonical
from tests.hermetic.conftest import Serve


@dataclass
class Authority:
    """A certificate authority, and the files of a gateway it has signed."""

    authority: trustme.CA
    files: TlsFiles

    def credentials(self, *, of_client: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
        """What a client needs to trust the gateway, and to be trusted if it shows a certificate."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority.cert_pem.bytes(),
            private_key=of_client.private_key_pem.bytes() if of_client else None,
            certificate_chain=of_client.cert_chain_pems[0].bytes() if of_client else None,
        )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority and files signed by it."""
    signer = trustme.CA()
    certificate = signer.issue_cert("127.0.0.1")
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    files.certificate.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    files.key.write_bytes(certificate.private_key_pem.bytes())
    assert files.client_ca is not None
    files.client_ca.write_bytes(signer.cert_pem.bytes())
    return Authority(signer, files)


async def test_a_gateway_that_trusts_the_certificate_is_served(
    serve_ext_proc: Serve, authority: Authority
) -> None:
    server_only = TlsFiles(authority.files.certificate, authority.files.key)
    decider = balancer(pool([A]))
    async with serve_ext_proc(decider, tls=server_only, credentials=authority.credentials()) as served:
        assert await served.replies(REQ()) == canonical(ROUTE(A))


async def test_plain_text_is_refused(serve_ext_proc: Serve, authority: Authority) -> None:
    async with serve_ext_proc(balancer(pool([A])), tls=authority.files) as served:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.replies(REQ())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("shows_certificate", [True, False])
async def test_with_a_client_authority_only_gateways_it_signed_are_served(
    serve_ext_proc: Serve, authority: Authority, shows_certificate: bool
) -> None:
    client = authority.authority.issue_cert("gateway.example") if shows_certificate else None
    credentials = authority.credentials(of_client=client)
    decider = balancer(pool([A]))
    async with serve_ext_proc(decider, tls=authority.files, credentials=credentials) as served:
        if shows_certificate:
            assert await served.replies(REQ()) == canonical(ROUTE(A))
        else:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await served.replies(REQ())
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_missing_file_is_named(serve_ext_proc: Serve, tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "cert.pem", tmp_path / "no-key.pem")
    missing.certificate.write_text("")
    with pytest.raises(OSError, match=r"no-key\.pem"):
        async with serve_ext_proc(balancer(pool([A])), tls=missing):
            pass


async def test_a_file_that_holds_no_certificate_is_an_error_at_the_start(
    serve_ext_proc: Serve, authority: Authority
) -> None:
    authority.files.certificate.write_text("nothing")
    with pytest.raises(OSError, match="cannot listen"):
        async with serve_ext_proc(balancer(pool([A])), tls=authority.files):
            pass
