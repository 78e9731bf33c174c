"""The verbs as clients of a server: the same output as without one, and reused KV."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import forks
import ports
from cli.conftest import ENDLESS, clean_environment, loom_of, names
from durable import wait_durable
from serving import KEY, Served, serving
from weft import samples
from weft.cli.server_backend import ServerLoomSession
from weft.errors import CapacityError
from weft.service.api import runtime_file
from weft.service.server import ServerConfig

FEW = ("--max-tokens", "6", "--seed", "1")
NAME = "tell-story-about-fox"
TOKEN = "a-token-of-enough-characters"
pytestmark = pytest.mark.programs  # a command, a server and a database at once
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with the looms of this test; WEFT_HOST is set."""
    with serving(own()) as server:
        monkeypatch.setenv("WEFT_HOST", server.url)
        yield server


def own(**options: Any) -> ServerConfig:
    """Return settings of a server with the looms of local commands."""
    return ServerConfig(port=0, db=f"sqlite:///{os.environ['WEFT_HOME']}/weft.db", **options)


def output_of(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    result_object: dict[str, Any] = json.loads(result.stdout)
    return result_object


WALK = [
    ("run", samples.story, "-n", "3", "--tree", *FEW),
    ("grow", "1", "-n", "2", "--tree", *FEW),
    ("tree",),
    ("read", "4"),
    ("read", "4", "--color", "prob"),
    ("next", "4", "--top", "3"),
    ("rm", "2", "4"),
    ("tree",),
    ("rm", "--undo"),
    ("undo",),
    ("redo",),
    ("grow", "4", "And then?", "-n", "1", "--note", "[Be sad.]", *FEW),
    ("tree",),
    ("grow", "4", "-n", "1", "--note", "", *FEW),
    ("run", "-c", "Go on.", "-n", "1", "--raw", *FEW),
    ("run", "Once upon", "--raw", "-n", "1", "--no-log", *FEW),
    ("solve", samples.sum, "-n", "2", "--seed", "1", "--answer", "last_number", "--check", "7"),
    ("undo",),
    ("redo",),
    ("find", "fox"),
    ("read", "1", "--loom", NAME),
    ("rm", NAME),
    ("ls",),
    ("rm", "--undo"),
    ("ls",),
]
STATISTICS = ("prefilled", "saved as", " · ")


def shown(weft: Any, verbs: list[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return the output of verbs, without statistics and ages, which may differ."""
    outputs = []
    for verb in verbs:
        result = weft(*verb)
        assert result.exit_code == 0, (verb, result.output)
        lines = [each for each in result.stdout.splitlines() if "prefilled" not in each]
        lines = [each for each in lines if "tokens · " not in each]
        if verb[0] == "ls":
            lines = [re.sub(r" +(now|\d+ min)  ", "  (ago)  ", each) for each in lines]
        outputs.append((verb[0], "\n".join(lines)))
    return outputs


def test_every_verb_has_the_same_output_with_and_without_a_server(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.looms.age", lambda changed_s: "now")  # however long it takes
    monkeypatch.setattr("weft.viz.terminal.WIDTH", 200)  # costs differ in length: none wraps
    here = shown(weft, WALK)
    monkeypatch.setenv("WEFT_HOME", str(home.parent / "other"))
    with serving(own()) as server:
        monkeypatch.setenv("WEFT_HOST", server.url)
        there = shown(weft, WALK)
    assert here == there


def test_json_has_the_same_fields_with_and_without_a_server(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs = [
        ("run", samples.story, "-n", "2", *FEW),
        ("tree",),
        ("read", "1"),
        ("next", "1"),
        ("find", "fox"),
        ("undo",),
        ("ls",),
    ]

    def shapes() -> list[list[str]]:
        lists = []
        for verb in verbs:
            result = output_of(weft(*verb, "--json"))
            lists.append([*result, *result.get("stats", {}), *(result.get("nodes") or [{}])[0]])
        return lists

    here = shapes()
    monkeypatch.setenv("WEFT_HOME", str(home.parent / "other"))
    with serving() as server:
        monkeypatch.setenv("WEFT_HOST", server.url)
        assert shapes() == here


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (("--resume", "search.json"), 3, "cannot use --resume; leave it out"),
        (("--budget-tokens", "0"), 2, "budget_tokens"),
    ],
)
def test_rejected_search_leaves_no_loom(
    weft: Any, served: Served, options: tuple[str, ...], status: int, why: str
) -> None:
    refused = weft("solve", samples.sum, *options)
    assert refused.exit_code == status, refused.output
    assert why in refused.stderr
    assert names() == []
    assert output_of(weft("ls", "--json"))["looms"] == []


def test_min_tokens_reaches_the_server(weft: Any, served: Served) -> None:
    run = ("run", "--raw", "Once upon a time", "-n", "1", "--json", *FEW)
    (plain,) = output_of(weft(*run))["branches"]
    stop = ("--stop", plain["text"][:1])
    (stopped,) = output_of(weft(*run, *stop))["branches"]
    (longer,) = output_of(weft(*run, *stop, "--min-tokens", "4"))["branches"]
    assert len(stopped["token_ids"]) == 1
    assert len(longer["token_ids"]) >= 4


def test_token_limits_reach_the_server(weft: Any, served: Served, tmp_path: Path) -> None:
    few = ("-n", "1", "--max-tokens", "8", "--temp", "0", "--json")
    run = ("run", "--raw", "Once upon a time", *few)
    (plain,) = output_of(weft(*run))["branches"]
    word, ids = max(plain["text"].split(), key=len), plain["token_ids"]
    (without,) = output_of(weft(*run, "--bad-words", word))["branches"]
    assert word not in without["text"]
    (short,) = output_of(weft(*run, "--stop-token-ids", str(ids[-1])))["branches"]
    assert short["token_ids"] == ids[: ids.index(ids[-1])]
    (narrow,) = output_of(weft(*run, "--allowed-token-ids", str(ids[0])))["branches"]
    assert narrow["token_ids"] == ids[:1] * 8
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [3, 7]}')
    (seven,) = output_of(weft(*run, "--json-schema", str(schema), "--bad-words", "3"))["branches"]
    assert seven["text"] == "7"
    wrong = weft(*run, "--stop-token-ids", "2048")
    assert wrong.exit_code == 2
    assert "token id 2048; allowed are 0 to 2047" in wrong.stderr


def test_server_reuses_kv_between_commands(weft: Any, served: Served) -> None:
    first = output_of(weft("run", samples.story, "-n", "2", "--json", *FEW))["stats"]
    second = output_of(weft("grow", "0", "-n", "2", "--json", *FEW))["stats"]
    assert (first["prefilled"], first["reused"]) == (12, 0)
    assert second["prefilled"] <= 1
    assert second["reused"] >= 11
    assert second["decoded"] == 12
    below = output_of(weft("grow", "1", "-n", "2", "--json", *FEW))["stats"]
    assert below["prefilled"] <= 1


def test_server_and_local_commands_share_looms(
    weft: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = output_of(weft("run", samples.story, "-n", "2", "--json", *FEW))
    monkeypatch.delenv("WEFT_HOST")
    assert names() == [NAME] == [growth["loom"]]
    assert {child.id for child in loom_of(NAME).children} == {b["id"] for b in growth["branches"]}
    tree = output_of(weft("tree", "--json"))  # of the same terminal
    assert tree["at"] in (1, 2)
    grown = output_of(weft("grow", "1", "-n", "1", "--json", *FEW))
    monkeypatch.setenv("WEFT_HOST", served.url)
    ids = {each["node"]: each["id"] for each in output_of(weft("tree", "--json"))["nodes"]}
    assert ids[grown["branches"][0]["node"]] == grown["branches"][0]["id"]


@pytest.mark.fluent
def test_chat_on_a_server_saves_everything(weft: Any, served: Served) -> None:
    typed = f"{samples.sum}\n/fork 2\n\n/undo\n{samples.greeting}\n/quit\n"
    result = weft("chat", "--max-tokens", "24", stdin=typed)
    assert result.exit_code == 0, result.output
    assert "The answer is 95." in result.stdout
    assert weft("run", "Hi", "--no-log", "-n", "1", *FEW).exit_code == 0
    assert sorted(names()) == ["hello-who-you", "what-37-58"]
    json_lines = weft("chat", "--json", *FEW, stdin=f"{samples.sum}\n").stdout
    assert json.loads(json_lines)["said"] == samples.sum


MISTAKES = [
    (("grow", "9"), 2, "there is no node 9; allowed is 0 (the prompt) to 1"),
    (("grow", "1", "-n", "0"), 2, "n: "),
    (("run", "hi", "--temperature", "-1"), 2, "temperature"),
    (("run", "hi there " * 1500), 2, "the context is 2048"),
    (("read", "nosuch"), 2, "allowed is a number, 0 (the prompt) to 1, or an id"),
    (("tree", "nosuch"), 2, f"there is no loom 'nosuch'; there are {NAME}"),
    (("run", "hi", "-m", "/etc/passwd"), 2, "rejects"),
    (("run", "hi", "--kv-budget", "1MiB"), 2, "the server runs tiny"),
    (("run", "hi", "--engine", "torch"), 2, "the server runs tiny"),
    (("redo",), 1, "nothing to redo"),
]


def test_unreadable_branches_of_a_server_raise(
    weft: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branches are saved, and the error does not say otherwise."""
    assert weft("run", samples.story, "-n", "1", *FEW).exit_code == 0
    read = ServerLoomSession._nodes
    n_read: list[int] = []

    def failing(kept: ServerLoomSession, **which: Any) -> Any:
        if which.get("depth") == 1:
            n_read.append(1)
            raise CapacityError("out of memory")
        return read(kept, **which)

    monkeypatch.setattr(ServerLoomSession, "_nodes", failing)
    result = weft("grow", "1", "-n", "2", "--json", *FEW)
    assert n_read
    assert result.exit_code == 4
    assert "out of memory" in result.output
    monkeypatch.setattr(ServerLoomSession, "_nodes", read)
    assert len(output_of(weft("tree", "--json"))["nodes"]) == 4


def test_mistake_on_a_server_has_the_same_message(weft: Any, served: Served) -> None:
    weft("run", samples.story, "-n", "1", *FEW)
    for arguments, code, message in MISTAKES:
        result = weft(*arguments)
        assert (result.exit_code, message in result.stderr) == (code, True), (
            arguments,
            result.output,
        )
        assert "Traceback" not in result.output


def test_open_prints_the_loom_address_of_the_server(weft: Any, served: Served) -> None:
    weft("run", samples.story, "-n", "1", *FEW)
    result = weft("open", "--no-browser", "--json")
    assert json.loads(result.stdout) == {"url": f"{served.url}/#{NAME}", "loom": NAME}


def test_import_and_export_work_through_a_server(weft: Any, served: Served, tmp_path: Path) -> None:
    weft("run", samples.story, "-n", "2", *FEW)
    for suffix in ("json", "md", "txt", "html", "dot", "mmd", "csv", "jsonl"):
        result = weft("export", str(tmp_path / f"a.{suffix}"), "--scope", "tree")
        assert result.exit_code == 0, (suffix, result.output)
        assert (tmp_path / f"a.{suffix}").stat().st_size
    (tmp_path / "broken.json").write_text("{")
    wrong = weft("import", str(tmp_path / "broken.json"))
    assert wrong.exit_code == 1
    assert f"{tmp_path / 'broken.json'}: it is no JSON" in wrong.stderr
    (tmp_path / "b.txt").write_text("[One] A fox.\n")
    text = output_of(weft("import", str(tmp_path / "b.txt"), "--name", "text", "--json"))
    assert (text["recognised_as"], text["nodes"], text["model"]) == ("text", 1, "tiny")
    assert weft("grow", "0", "--loom", "text", "-n", "1", *FEW).exit_code == 0
    words = weft("import", str(tmp_path / "a.json"), "--name", "words")
    assert words.stdout.startswith("imported 1 loom, 2 nodes from a.json")
    assert words.stderr.startswith(f"tokens of the model tiny; weft import {tmp_path}/a.json -m")
    brought = output_of(weft("import", str(tmp_path / "a.json"), "--name", "again", "--json"))
    assert (brought["looms"], brought["nodes"]) == (["again"], 3)
    assert (
        output_of(weft("grow", "1", "--loom", "again", "-n", "1", "--json", *FEW))["loom"]
        == "again"
    )


def test_named_server_gets_the_key_or_a_hint_asks_for_it(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(own(api_key=KEY)) as server:
        monkeypatch.setenv("WEFT_HOST", server.url)
        refused = weft("ls")
        assert refused.exit_code == 2
        assert "set WEFT_API_KEY to the server's key" in refused.stderr
        monkeypatch.setenv("WEFT_API_KEY", KEY)
        assert weft("ls").exit_code == 0
        monkeypatch.setenv("WEFT_API_KEY", KEY + "x")
        wrong = weft("ls")
        assert wrong.exit_code == 2
        assert KEY not in wrong.output


def test_named_server_without_answer_raises(weft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.reserved() as port:
        monkeypatch.setenv("WEFT_HOST", f"127.0.0.1:{port}")
        for verb in (("ls",), ("run", "hi"), ("tree",), ("open",)):
            result = weft(*verb)
            assert result.exit_code == 3
            assert "no server is running at http://127.0.0.1:" in result.stderr
    monkeypatch.setenv("WEFT_HOST", "http://[")
    assert weft("ls").exit_code == 2
    monkeypatch.delenv("WEFT_HOST")
    nothing = weft("open")
    assert nothing.exit_code == 3
    assert "weft serve starts one" in nothing.stderr


# A server without WEFT_HOST


def published(server: Served) -> AbstractContextManager[None]:
    """Write the runtime file that `weft serve` writes."""
    port = int(server.url.rpartition(":")[2])
    return runtime_file.runtime_file(server.url, port, server.service.token)


def looked_for_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    from weft.service.api import address

    server_address = address.ServerAddress("127.0.0.1", int(url.rpartition(":")[2]))
    at = address.address

    def find(environment: Any = None) -> address.ServerAddress:
        return server_address if environment is None else at(environment)

    monkeypatch.setattr(address, "address", find)


def test_server_with_runtime_file_is_used_without_weft_host(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_file, "_READ_TIMEOUT_S", 60.0)  # even on a busy machine
    weft("run", samples.sum, "-n", "1")
    with serving(own()) as server, published(server):
        looked_for_at(monkeypatch, server.url)
        assert output_of(weft("ls", "--json"))["where"] == server.url
        warm = output_of(weft("grow", "0", "-n", "1", "--json", *FEW))["stats"]
        assert warm["prefilled"] + warm["reused"] == 14
        # Another model is loaded here, and the looms are the same.
        folder = str(Path(samples.__file__).parent / "data" / "tiny")
        numpy = ("-m", folder, "--engine", "numpy")
        here = output_of(weft("run", "Hi", *numpy, "-n", "1", "--json", *FEW))
        assert here["model"] == folder
        assert here["loom"] in names()
        # Not used: a server of other looms, or one without a runtime file in WEFT_HOME.
        monkeypatch.setenv("WEFT_DB", f"sqlite:///{home.parent}/other.db")
        assert output_of(weft("ls", "--json"))["looms"] == []
        monkeypatch.delenv("WEFT_DB")
        monkeypatch.setenv("WEFT_HOME", str(home.parent / "other"))
        assert "other" in output_of(weft("ls", "--json"))["where"]


def test_resumed_search_runs_locally_despite_a_server(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runtime_file, "_READ_TIMEOUT_S", 60.0)  # even on a busy machine
    command = ("solve", samples.sum, "--strategy", "greedy", "--resume", str(tmp_path / "search"))
    with serving(own()) as server, published(server):
        looked_for_at(monkeypatch, server.url)
        first, second = (output_of(weft(*command, "--json")) for _ in range(2))
        assert (second["answer"], second["stats"]["decoded"]) == (first["answer"], 0)
        looms = {loom["name"] for loom in output_of(weft("ls", "--json"))["looms"]}
    assert looms == {first["loom"], second["loom"]}


def test_server_with_api_key_is_used_by_token(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_file, "_READ_TIMEOUT_S", 60.0)
    with serving(own(api_key=KEY)) as server, published(server):
        looked_for_at(monkeypatch, server.url)
        assert output_of(weft("ls", "--json"))["where"] == server.url


def test_runtime_file_is_private_and_removed_at_exit(home: Path) -> None:
    with runtime_file.runtime_file("http://127.0.0.1:1", 1, TOKEN):
        (file,) = home.glob("server-*")
        assert file.name == "server-1.json"
        assert sys.platform == "win32" or file.stat().st_mode & 0o777 == 0o600
    assert list(home.glob("server-*")) == []


def test_no_request_is_sent_without_runtime_file(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        looked_for_at(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert weft("ls").exit_code == 0
        with pytest.raises(TimeoutError):
            listener.accept()


def test_stale_runtime_file_sends_no_api_key_to_another_server(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[bytes] = []
    monkeypatch.setenv("WEFT_API_KEY", KEY)

    def answer(listener: socket.socket, response: bytes) -> None:
        connection, _ = listener.accept()
        with connection:
            requests.append(connection.recv(4096))
            connection.sendall(response)

    bodies = (b"{}", b'{"token_accepted": false}', b'{"token_accepted": 3}', b"[", b"\xff")
    for body in bodies:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            thread = threading.Thread(target=answer, args=(listener, response))
            thread.start()
            port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            looked_for_at(monkeypatch, url)
            with runtime_file.runtime_file(url, port, TOKEN):
                assert "weft.db" in output_of(weft("ls", "--json"))["where"]
            thread.join()
    assert len(requests) == 5
    assert all(TOKEN.encode() in request and KEY.encode() not in request for request in requests)


# A server that dies


@pytest.fixture
def process(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """`weft serve` in a new process; WEFT_HOST is set."""
    log = home.parent / "log"
    with log.open("wb") as file:
        arguments = ("serve", "--port", "0")
        running = forks.start(forks.WEFT, *arguments, env=clean_environment(), stderr=file)
    while not (address := re.search(r" at (http://\S+)\n", log.read_text())):
        time.sleep(0.05)
    monkeypatch.setenv("WEFT_HOST", address[1])
    yield running
    running.kill()
    running.wait()


@pytest.mark.fluent
@posix
def test_server_killed_during_growth_keeps_partial_nodes(
    weft: Any, process: subprocess.Popen[bytes], started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = started("run", samples.story, "--tree", "-n", "2", *ENDLESS)
    assert growing.stdout.read(4) == b"[1] "
    wait_durable(NAME, 2)
    process.send_signal(signal.SIGKILL)
    _, errors = growing.communicate()
    assert growing.returncode == 3
    assert b"no longer responds" in errors
    assert b"saves generated nodes" in errors
    monkeypatch.delenv("WEFT_HOST")
    kept = [(child.finish_reason, bool(child.tokens)) for child in loom_of(NAME).children]
    assert kept == [("interrupted", True)] * 2


@posix
def test_ctrl_c_ends_a_growth_at_the_server_and_keeps_it(
    weft: Any, process: subprocess.Popen[bytes], started: Any
) -> None:
    growing = started("run", samples.story, "--tree", "-n", "2", *ENDLESS)
    assert growing.stdout.read(4) == b"[1] "
    growing.send_signal(signal.SIGINT)
    output, errors = growing.communicate()
    assert growing.returncode == 130, errors
    assert b"interrupted: the branches are as far as they came" in errors
    assert b"saved as" in output
    nodes = output_of(weft("tree", "--json"))["nodes"]
    assert [each["finish_reason"] for each in nodes[1:]] == ["cancelled"] * 2
    assert os.environ["WEFT_HOST"]
