"""API keys, Host and Origin checks, and the responses to rejected requests."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator

import pytest

from serving import KEY, Served, serving
from weft.errors import ConfigError
from weft.service.server import ServerConfig


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(ServerConfig(port=0, api_key=KEY, docs=True)) as server:
        yield server


def paths(server: Served) -> list[str]:
    routes = server.client.get("/openapi.json").json()["paths"]
    return [*routes, "/docs", "/openapi.json", "/nowhere"]


def test_every_route_requires_the_key(locked: Served) -> None:
    import httpx2 as httpx

    with httpx.Client(base_url=locked.url, timeout=None) as anonymous:
        for path in paths(locked):
            answer = anonymous.get(path)
            assert answer.status_code == 401
            assert "an API key is needed" in answer.text


@pytest.mark.parametrize("key", ["x", KEY[:-1], KEY + "x", KEY.upper(), "é", "x" * 10_000])
def test_wrong_key_is_rejected(locked: Served, key: str) -> None:
    answer = locked.client.get("/healthz", headers={"Authorization": f"Bearer {key}".encode()})
    assert answer.status_code == 401
    assert KEY not in answer.text


def test_a_browser_may_send_the_key_as_a_password(locked: Served) -> None:
    given = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    answer = locked.client.get("/healthz", headers={"Authorization": f"Basic {given}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1@evil.example", "", "[::1"]
)
def test_unknown_host_is_rejected(served: Served, host: str) -> None:
    answer = served.client.get("/healthz", headers={"Host": host})
    assert answer.status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000"])
def test_loopback_names_are_accepted(served: Served, host: str) -> None:
    assert served.client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_pages_of_other_origins_are_rejected(served: Served, headers: dict[str, str]) -> None:
    answer = served.client.get("/healthz", headers=headers)
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in answer.headers


def test_own_origin_is_accepted(served: Served) -> None:
    assert served.client.get("/healthz", headers={"Origin": served.url}).status_code == 200


def test_public_host_requires_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "weft.example"):
        with pytest.raises(ConfigError, match="API key"):
            ServerConfig(host=host)
    assert not ServerConfig(host="0.0.0.0", api_key=KEY).has_docs


def test_key_is_in_no_repr() -> None:
    assert KEY not in repr(ServerConfig(api_key=KEY))


def test_request_id_is_returned(served: Served) -> None:
    assert (
        served.client.get("/healthz", headers={"X-Request-Id": "a.b-1"}).headers["x-request-id"]
        == "a.b-1"
    )
    answer = served.client.get(
        "/nowhere", headers={"X-Request-Id": "no good\xff".encode("latin-1")}
    )
    assert answer.headers["x-request-id"].startswith("rq_")
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/models", "/v1/models/tiny"])
def test_head_is_answered_as_get_without_a_body(served: Served, path: str) -> None:
    get, head = served.client.get(path), served.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


def test_routes_are_counted_by_their_template(served: Served) -> None:
    served.client.get("/no/such/place/one-made-up")
    served.client.get("/healthz")
    counted = 'weft_http_requests_total{method="GET",route="/healthz",status="200"}'
    while counted not in (page := served.client.get("/metrics").text):
        time.sleep(0.01)
    assert "one-made-up" not in page
