"""`weft serve` as a process: signals, ports, and crashes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import weft
from durable import wait_durable
from serving import serving
from weft.service.server import ServerConfig
from weft.service.store.library import Library

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(os.name != "posix", reason="signals of POSIX"),
]


with weft.load("tiny") as _lm:
    NO_END = {str(token): -1e6 for token in _lm.text.stop_ids}


SERVE = (sys.executable, "-m", "weft", "serve", "--port", "0")


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a server whose home is `home`."""
    variables = {**os.environ, "WEFT_HOME": str(home), "OPENBLAS_NUM_THREADS": "1"}
    for name in ("WEFT_DB", "WEFT_HOST", "WEFT_PORT", "WEFT_API_KEY"):
        variables.pop(name, None)
    return variables


class Process:
    """A running `weft serve`."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.log = home / "log"  # a file: a line reader would lose its buffer
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [*SERVE, *options],
                env=environment(home),
                stderr=log,
                stdout=subprocess.DEVNULL,
            )
        while not (lines := re.findall(r"^serving (.*) at (\S+)\n", self.log.read_text(), re.M)):
            time.sleep(0.02)
        ((self.models, self.url),) = lines
        self.client = httpx.Client(base_url=self.url, timeout=None)
        assert self.client.get("/readyz").status_code == 200

    def until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            time.sleep(0.02)

    def nodes(self, loom: str) -> list[dict[str, Any]]:
        """Return the branches of a loom, as far as they have grown."""
        rows: list[dict[str, Any]] = self.client.get(f"/api/v1/looms/{loom}/nodes").json()["data"]
        return rows[1:]

    def until_it_stops(self) -> None:
        """Wait until a signal was taken."""
        self.until(lambda: self.client.get("/readyz").status_code != 200)

    def loom(self, **body: Any) -> str:
        """Make a loom in which something grows; return its id."""
        loom: str = self.client.post("/api/v1/looms", json={"prompt": "Once"}).json()["id"]
        given = {"max_tokens": 1900, "logit_bias": NO_END, **body}
        answer = self.client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json=given)
        assert answer.status_code in (200, 202), answer.text
        return loom

    def end(self) -> tuple[int, str]:
        """Wait for the server's exit; return its exit code and its log."""
        self.client.close()
        code = self.popen.wait()
        return code, self.log.read_text()


@contextmanager
def running(home: Path, *options: str) -> Iterator[Process]:
    process = Process(home, *options)
    try:
        yield process
    finally:
        process.client.close()
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()


@pytest.mark.parametrize(("option", "opens"), [("--browser", True), ("--no-browser", False)])
def test_open_flag_opens_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, opens: bool
) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    with running(tmp_path, option) as server:
        while opens and not opened.exists():
            time.sleep(0.02)
        assert not opens or opened.read_text().strip() == server.url
    assert opened.exists() == opens


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("foo",), 2, "'foo' is not known"),
        (("./nope", "--also", "./nope2"), 3, "there is no folder ./nope2"),
        (("tiny", "--n-ctx", "100000"), 2, "n_ctx is 100000"),
    ],
)
def test_server_exits_with_the_error_of_its_only_model(
    tmp_path: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    command = [*SERVE, "--no-browser", *options]
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert ended.returncode == code
    (line,) = [each for each in ended.stderr.splitlines() if message in each]  # once
    assert line.startswith("weft: ")
    assert "Traceback" not in ended.stderr
    assert "serving" not in ended.stderr


def test_server_continues_if_another_model_loads(tmp_path: Path) -> None:
    with running(tmp_path, "nope", "--also", "tiny") as server:
        models = server.client.get("/api/v1/models").json()["data"]
        assert {each["id"]: each["state"] for each in models} == {"nope": "failed", "tiny": "ready"}
        assert server.models == "tiny"
        assert (
            server.client.post("/v1/completions", json={"max_tokens": 1}).json()["model"] == "tiny"
        )
        server.popen.send_signal(signal.SIGTERM)
        code, log = server.end()
        assert (code, "'nope' is not known" in log) == (0, True)


def test_an_application_stays_without_any_model() -> None:
    with serving(ServerConfig(port=0, models=("nope",)), wait=False) as served:
        while served.client.get("/api/v1/models/nope").json()["state"] != "failed":
            time.sleep(0.02)
        given = {"source": "tiny", "wait": True}
        assert served.client.post("/api/v1/models", json=given).json()["status"] == "ok"
        assert served.client.get("/readyz").status_code == 200


def test_open_event_stream_does_not_delay_shutdown(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "100000") as server:  # it would hang for all of it
        loom = server.client.post("/api/v1/looms", json={"prompt": "Once"}).json()["id"]
        events = f"{server.url}/api/v1/looms/{loom}/events?tokens=true"
        with httpx.stream("GET", events, timeout=None) as feed:
            lines = feed.iter_lines()
            assert next(lines)  # its snapshot
            server.popen.send_signal(signal.SIGTERM)
            list(lines)  # ends by itself: one that is cut off raises
        code, log = server.end()
        assert (code, "Traceback" in log) == (0, False)


def test_log_has_each_space_before_a_constraint_of_completions_once(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for word in ("ran", "sat", "ran"):
            body = {"prompt": "The fox ", "max_tokens": 4, "guided_choice": [word]}
            assert server.client.post("/v1/completions", json=body).status_code == 200
        server.popen.send_signal(signal.SIGTERM)
        _, log = server.end()
    warned = [line for line in log.splitlines() if "ends in a space" in line]
    assert [("' r" in line, "' s" in line) for line in warned] == [(True, False), (False, True)]


def test_sigterm_waits_for_jobs_and_saves_the_rest(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "2") as server:
        loom = server.loom(n=8)
        server.until(lambda: all(node["n_tokens"] > 5 for node in server.nodes(loom)))
        server.popen.send_signal(signal.SIGTERM)
        server.until_it_stops()
        answer = server.client.get("/readyz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        refused = server.client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json={})
        assert refused.json()["error"]["code"] == "shutting_down"
        created = server.client.post("/api/v1/looms", json={"prompt": "Twice"})
        assert created.status_code == 201  # no model runs for it
        assert server.end()[0] == 0
    with Library(f"sqlite:///{tmp_path}/weft.db") as library:
        nodes = library.open(loom).loom.children
        assert [node.finish_reason for node in nodes] == ["interrupted"] * 8
        assert all(len(node.tokens) > 5 for node in nodes)


def test_second_sigterm_exits_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "100000") as server:  # it would hang for all of it
        server.loom()
        server.popen.send_signal(signal.SIGTERM)
        server.until_it_stops()
        server.popen.send_signal(signal.SIGTERM)
        code, log = server.end()
        assert code == -signal.SIGTERM
        # Commands use the default port, so the log names the variable for another port.
        assert f"WEFT_HOST={server.url.removeprefix('http://')}" in log


def killed(home: Path, n: int) -> None:
    """Kill servers with -9 during growth; finished nodes are complete, the others partial."""
    finished: dict[str, list[dict[str, Any]]] = {}
    for at in range(n):
        with running(home) as server:
            loom = server.loom(n=2)
            path = f"/api/v1/looms/{loom}/nodes/0/generate"
            done = server.client.post(path, json={"n": 2, "max_tokens": 5, "wait": True})
            finished[loom] = done.json()["nodes"]
            wait_durable(loom, 2, f"sqlite:///{home}/weft.db")
            time.sleep(0.05 * (at % 10))
            server.popen.kill()
            server.popen.wait()
        with Library(f"sqlite:///{home}/weft.db") as library:
            for loom, nodes in finished.items():
                tree = library.open(loom).loom
                there = {node.id: node for node in tree.walk()}
                for node in nodes:
                    assert there[node["id"]].tokens == node["token_ids"]
                partial = [
                    each for each in tree.children if each.id not in {n["id"] for n in nodes}
                ]
                assert [node.finish_reason for node in partial] == ["interrupted"] * 2
                assert all(node.tokens for node in partial)


def test_kill_9_loses_no_ended_branch(tmp_path: Path) -> None:
    killed(tmp_path, 3)


def test_branch_reported_as_kept_is_unchanged_after_kill_9(tmp_path: Path) -> None:
    """The job's other branches are never committed; some branches end without a token."""
    ends: list[dict[str, Any]] = []
    with running(tmp_path) as server:
        loom = server.client.post("/api/v1/looms", json={"prompt": weft.samples.opening}).json()[
            "id"
        ]
        body = {"n": 64, "max_tokens": 1900, "temperature": 1.5, "seed": 1, "stream": True}
        path, name = f"/api/v1/looms/{loom}/nodes/0/generate", ""
        with server.client.stream("POST", path, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: ") and name == "branch":
                    ends.append(json.loads(line[6:]))
                    if len(ends) == 5:
                        break
            server.popen.kill()
            server.popen.wait()
    with running(tmp_path) as server:
        there = {node["node"]: node for node in server.nodes(loom)}
    for end in ends:
        row = there[end["node"]]
        names = ("finish_reason", "ended", "n_tokens", "mean_logprob")
        assert end["kept"]
        assert {name: row[name] for name in names} == {name: end[name] for name in names}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repeated_kill_9_loses_no_ended_branch(tmp_path: Path) -> None:
    killed(tmp_path, 50)
