"""A Hub on 127.0.0.1: the few endpoints that the Hub's own client asks for one model repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repo:
    """revisions: branch or tag → commit hash; commits: commit hash → file name → content."""

    id: str
    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def push(self, revision: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.revisions[revision] = sha
        self.commits[sha] = files
        return sha

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.revisions.get(revision)


class Hub(ThreadingHTTPServer):
    """requests: 'METHOD /path' of every request so far."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repo: Repo) -> Repo:
        self.repos[repo.id] = repo
        return repo


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let the Hub's client ask `url` alone, and keep what it gets in `cache`; no bars."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} /{path}")
        api = path.startswith("api/models/")
        owner, *rest = path.removeprefix("api/models/").split("/")
        repo = self.server.repos.get(owner)  # an old name, without an owner
        if repo is None and rest:
            repo = self.server.repos.get(f"{owner}/{rest.pop(0)}")
        if repo is None:
            return self._send_failure(404, "RepoNotFound")
        if repo.token and self.headers.get("authorization") != f"Bearer {repo.token}":
            failure = (403, "GatedRepo") if repo.gated else (401, "RepoNotFound")
            return self._send_failure(*failure)
        kind, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        sha = repo.commit(revision)
        if sha is None:
            return self._send_failure(404, "RevisionNotFound")
        files = repo.commits[sha]
        if api:
            body = _tree(files) if kind == "tree" else _info(repo, sha, files)
            return self._send(json.dumps(body).encode(), {"Content-Type": "application/json"})
        content = files.get("/".join(rest[2:]))
        if content is None:
            return self._send_failure(404, "EntryNotFound")
        return self._send(content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": sha})

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send_failure(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
        for name, content in files.items()
    ]


def _info(repo: Repo, sha: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, "size": len(content), "blobId": _oid(content)}
        for name, content in files.items()
    ]
    return {"_id": "0", "id": repo.id, "modelId": repo.id, "sha": sha, "siblings": siblings}
