"""The server delivers the files of the page."""

from __future__ import annotations

import gzip
import re

import pytest

from serving import Served
from weft.service.server.routes.page import BUILT


def test_page_loads_nothing_from_other_hosts(served: Served) -> None:
    answer = served.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/html")
    policy = dict(
        each.strip().split(" ", 1) for each in answer.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["worker-src"] == "'self'"
    linked = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert linked
    for path in linked:
        assert path.startswith("/assets/"), path
        assert served.client.get(path).status_code == 200, path


def test_first_script_fits_in_120_kB_gzipped() -> None:
    (script,) = BUILT.glob("assets/index-*.js")
    assert len(gzip.compress(script.read_bytes(), mtime=0)) <= 120_000


def test_known_etag_gets_304(served: Served) -> None:
    first = served.client.get("/")
    cached = served.client.get("/", headers={"If-None-Match": first.headers["ETag"]})
    assert (cached.status_code, cached.content) == (304, b"")
    (script,) = BUILT.glob("assets/index-*.js")
    answer = served.client.get(f"/assets/{script.name}")
    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.content == script.read_bytes()


@pytest.mark.parametrize("path", ["/assets/nothing.js", "/assets/..%2findex.html", "/assets/"])
def test_only_the_pages_files_are_served(served: Served, path: str) -> None:
    assert served.client.get(path).status_code == 404


def test_n8looms_page_address_redirects(served: Served) -> None:
    answer = served.client.get("/static/index.html", follow_redirects=False)
    assert answer.headers["Location"] == "/"


def test_docs_load_nothing_from_other_hosts(served: Served) -> None:
    page = served.client.get("/docs").text
    linked = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(linked) == 3
    for path in linked:
        assert path.startswith("/docs/"), path
        assert served.client.get(path).status_code == 200, path
    assert "http" not in page.replace("http-equiv", "")
