"""API keys and CORS."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from graph_passes.errors import InvalidArgument
from service import auth
from service.app import create_app
from service.auth import read_keys
from service.settings import Settings
from tests.errors import raises

EMBED = {"inputs": "a"}


@pytest.fixture
def guarded(start: Callable[..., TestClient], encoder: Path, tmp_path: Path) -> TestClient:
    (tmp_path / "keys").write_text("# a comment\nfirst-key\n\n  second-key \n")
    return start(encoder, api_keys="third-key,fourth-key", api_keys_file=tmp_path / "keys")


@pytest.mark.parametrize("header", ["Bearer {}", "bearer  {}", "x-api-key"])
def test_require_key_each_key_is_accepted_in_either_header(
    guarded: TestClient, header: str
) -> None:
    for key in ("first-key", "second-key", "third-key", "fourth-key"):
        name = "x-api-key" if header == "x-api-key" else "authorization"
        headers = {name: key if name == header else header.format(key)}
        assert guarded.post("/texts/embed", json=EMBED, headers=headers).status_code == 200
        assert guarded.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-keyy"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": ""},
        {"x-api-key": "FIRST-KEY"},
        {"x-api-key": "# a comment"},
    ],
)
def test_require_key_other_requests_are_refused(
    guarded: TestClient, headers: dict[str, str]
) -> None:
    for method, path in (
        ("POST", "/texts/embed"), ("GET", "/metrics"), ("GET", "/v2"), ("GET", "/docs"),
        ("GET", "/no"),
    ):  # fmt: skip
        answer = guarded.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert list(answer.json()) == ["error"]
        assert answer.headers["x-request-id"]


def test_require_key_health_checks_need_none(guarded: TestClient) -> None:
    assert guarded.get("/v2/health/live").json() == {"live": True}
    assert guarded.get("/v2/health/ready").json() == {"ready": True}
    assert guarded.get("/v2/health/ready/").status_code == 401


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "keys.unreadable"),
        (b"", "keys.none"),
        (b"# only\n", "keys.none"),
        (b"\xff\xfe", "keys.unreadable"),
        ("schlüssel".encode(), "keys.characters"),
    ],
)
def test_read_keys_unusable_file_is_refused(
    tmp_path: Path, content: bytes | None, code: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument) as error:
        read_keys(Settings(model=tmp_path, api_keys_file=path))
    assert error.value.code == code


def test_read_keys_empty_key_is_refused(tmp_path: Path) -> None:
    settings = Settings.model_validate({"model": tmp_path, "api_keys": ["one", ""]})
    with raises(InvalidArgument, "keys.empty", "key 2 of 2"):
        read_keys(settings)


@pytest.mark.parametrize(
    ("name", "value", "code", "text"),
    [
        *(
            ("ATTNSERVE_API_KEYS", empty, "settings.invalid", "api_keys")
            for empty in ("", ",", " , ")
        ),
        *(
            (name, "secret", "settings.unknown", name)
            for name in (
                "ATTNSERVE_API_KEY",
                "ATTNSERVE_APIKEYS",
                "attnserve_api_key_file",
                "ATTNSERVE_ADMIN_KEY",
            )
        ),
    ],
)
def test_api_keys_variable_empty_or_misspelled_is_refused(
    encoder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str, text: str
) -> None:
    """A secret that a deployment forgot to set must not disable authentication."""
    monkeypatch.setenv("ATTNSERVE_MODEL", str(encoder))
    monkeypatch.setenv(name, value)
    with raises(InvalidArgument, code, text) as error:
        create_app()
    assert "secret" not in str(error.value)


def test_settings_repr_hides_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", "one-key, other-key")
    settings = Settings(model=tmp_path)
    checksums = [sha256(key).digest() for key in (b"one-key", b"other-key")]
    assert list(read_keys(settings)) == checksums
    assert "one-key" not in repr(settings)


def test_cors_allows_only_configured_origins(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    origin = {"origin": "https://a.example"}
    preflight = origin | {"access-control-request-method": "POST"}
    closed = start(encoder)
    for answer in (
        closed.options("/texts/embed", headers=preflight),
        closed.post("/texts/embed", json=EMBED, headers=origin),
    ):
        assert "access-control-allow-origin" not in answer.headers
    opened = start(encoder, cors_origins="https://a.example, https://b.example", api_keys="k")
    assert opened.options("/texts/embed", headers=preflight).status_code == 200
    answer = opened.post("/texts/embed", json=EMBED, headers=origin | {"x-api-key": "k"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = opened.options("/texts/embed", headers=preflight | {"origin": "https://c.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//[x]", "null", "http://a\x7f["])
def test_malformed_origin_may_not_load_models(
    start: Callable[..., TestClient], encoder: Path, origin: str
) -> None:
    client = start(encoder)
    for action in ("load", "unload"):
        answer = client.post(f"/v2/repository/models/tiny/{action}", headers={"origin": origin})
        assert answer.status_code == 403


def test_changed_key_file_is_read_again(
    start: Callable[..., TestClient], encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_S", 0)
    (path := tmp_path / "keys").write_text("first")
    client = start(encoder, api_keys_file=path)

    def status(key: str) -> int:
        return client.post("/texts/embed", json=EMBED, headers={"x-api-key": key}).status_code

    assert (status("first"), status("second")) == (200, 401)
    (tmp_path / "new").write_text("second")
    (tmp_path / "new").replace(path)
    assert (status("first"), status("second")) == (401, 200)
    path.write_text("# none")  # must not let everybody in, or nobody
    assert (status("first"), status("second")) == (401, 200)
    path.unlink()
    assert (status(""), status("second")) == (401, 200)


# Loading and unloading


UNLOAD = "/v2/repository/models/{}/unload"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:8000", 200),
        ("http://localhost:9000", 200),
        ("https://own.example", 200),
        ("https://evil.example", 403),
        ("http://rebind.evil.example:8000", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_sites_cannot_unload(
    start: Callable[..., TestClient], encoder: Path, origin: str | None, status: int
) -> None:
    client = start(encoder, cors_origins="https://own.example")
    headers = {} if origin is None else {"origin": origin, "content-type": "text/plain"}
    answer = client.post(UNLOAD.format("tiny"), headers=headers)
    assert answer.status_code == status
    assert client.post("/texts/embed", json=EMBED).status_code == (503 if status == 200 else 200)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 200),
        ({"host": "::1"}, 200),
        ({"host": "0.0.0.0"}, 403),
        ({"host": "192.0.2.1"}, 403),
        ({"host": "0.0.0.0", "model_control": True}, 200),
        ({"model_control": False}, 403),
    ],
)
def test_model_control_is_off_beyond_this_machine(
    start: Callable[..., TestClient], encoder: Path, given: dict[str, object], status: int
) -> None:
    client = start(encoder, **given)
    assert client.post(UNLOAD.format("tiny")).status_code == status
    assert client.post(UNLOAD.format("tiny%2f")).status_code in (403, 404)


@pytest.mark.parametrize("end", ["%0A", "%0a%0a", "%0D", "%20", "%09", "/"])
def test_control_of_models_is_refused_at_paths_with_other_ends(
    start: Callable[..., TestClient], encoder: Path, end: str
) -> None:
    """The patterns of the router match a line break at the end of a path."""
    client = start(encoder, host="0.0.0.0")
    assert client.post(UNLOAD.format("tiny") + end, follow_redirects=False).status_code != 200
    assert client.post("/texts/embed", json=EMBED).status_code == 200


def test_admin_keys_are_needed_to_unload_and_suffice_for_all(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder, api_keys="user", admin_keys="admin, other")
    status = {
        key: client.post(UNLOAD.format("tiny"), headers={"x-api-key": key}).status_code
        for key in ("user", "nobody", "admin")
    }
    assert status == {"user": 403, "nobody": 401, "admin": 200}
    assert client.get("/stats.json", headers={"x-api-key": "other"}).status_code == 200


def test_admin_keys_alone_leave_other_requests_open(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder, admin_keys="admin")
    assert client.post("/texts/embed", json=EMBED).status_code == 200
    assert client.post(UNLOAD.format("tiny")).status_code == 403
