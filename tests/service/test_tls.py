"""HTTPS, and certificates of clients."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx2
import pytest

from graph_passes.errors import InvalidArgument
from service.server import check_tls
from service.settings import Settings
from tests.errors import raises
from tests.service.conftest import until
from tests.service.processes import starting
from tests.service.tiny import write_encoder

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate"),
]

PASSWORD = "a password"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A self-signed certificate of 127.0.0.1 and its key, with and without a password."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key, locked = (folder / name for name in ("cert.pem", "key.pem", "locked.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(
        ["openssl", "rsa", "-aes256", "-in", key, "-out", locked, "-passout", f"pass:{PASSWORD}"],
        check=True,
        capture_output=True,
    )
    return {"cert": cert, "key": key, "locked": locked}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_server_with_certificate_serves_https(
    tmp_path: Path, files: dict[str, Path], workers: str
) -> None:
    model = write_encoder(tmp_path / "tiny")
    given = ["--ssl-certfile", files["cert"], "--ssl-keyfile", files["locked"]]
    if workers == "2":
        given += ["--ssl-ca-certs", files["cert"]]  # clients need this certificate too
    context = ssl.create_default_context(cafile=str(files["cert"]))
    with starting(
        model, *map(str, given), "--workers", workers,
        ATTNSERVE_SSL_KEYFILE_PASSWORD=PASSWORD, ATTNSERVE_PROBE="false",
    ) as (address, process):  # fmt: skip
        assert process.stderr is not None
        line = process.stderr.readline()
        assert re.search(r"serving tiny at https://127\.0\.0\.1:", line), line
        address = address.replace("http:", "https:")
        if workers == "2":
            with pytest.raises((httpx2.TransportError, ssl.SSLError)):
                httpx2.get(f"{address}/v2/health/live", verify=context)
            context.load_cert_chain(files["cert"], files["key"])
        with httpx2.Client(base_url=address, verify=context) as client:
            until(lambda: client.get("/v2/health/ready").status_code == 200)
            assert client.post("/texts/embed", json={"inputs": "a"}).status_code == 200
        with pytest.raises(httpx2.TransportError):
            httpx2.get(address.replace("https:", "http:"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ssl_certfile": "missing"}, "No such file"),
        ({"ssl_keyfile": "key"}, "`ssl_certfile` is missing"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "locked"}, "HTTPS is not possible"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "cert"}, "HTTPS is not possible"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "missing"}, "No such file"),
    ],
)
def test_unusable_tls_files_are_refused(
    files: dict[str, Path], given: dict[str, str], text: str
) -> None:
    paths = {name: files.get(value, Path(value)) for name, value in given.items()}
    with raises(InvalidArgument, "server.tls", text):
        check_tls(Settings.model_validate({"model": "m", **paths}))
