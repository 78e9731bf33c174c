"""The models of a server: loaded by request, evicted, loaded again, and failed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serving import Served, serving
from shallow import shallow
from weft.errors import ConfigError
from weft.service.server import ServerConfig

Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(shallow(), root / "small")
    (root / "broken").mkdir()
    (root / "broken.gguf").write_bytes(b"GGUF but no header")
    return root


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A server with room for `tiny`, which it was started with, and one more model."""
    config = ServerConfig(
        port=0, model_roots=(folder,), max_models=2, kv_budget="64MiB", engine="numpy"
    )
    with serving(config) as server:
        yield server


def load(served: Served, source: Path, name: str, **more: Any) -> Json:
    """Load a model by request; return the job."""
    given = {"source": str(source), "id": name, "wait": True, **more}
    answer = served.client.post("/api/v1/models", json=given)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def states(served: Served) -> dict[str, str]:
    """Return the state of each model by its name."""
    models = served.client.get("/api/v1/models").json()["data"]
    return {model["id"]: model["state"] for model in models}


def complete(served: Served, model: str) -> tuple[int, Json]:
    """Ask a model for two tokens; return the status and the answer."""
    body = {"model": model, "prompt": "Once", "max_tokens": 2}
    answer = served.client.post("/v1/completions", json=body)
    return answer.status_code, answer.json()


def test_load_evicts_requested_models_and_calls_reload_them(
    served: Served, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(served, folder / "small", "a")
    loom = served.client.post("/api/v1/looms", json={"prompt": "Once", "model": "a"}).json()["id"]
    load(served, folder / "small", "b")
    assert states(served) == {"tiny": "ready", "a": "evicted", "b": "ready"}
    assert "evicting model a to make room for b" in caplog.text
    assert {each["id"] for each in served.client.get("/v1/models").json()["data"]} == {
        *("tiny", "a", "b")
    }
    assert complete(served, "a")[0] == 200
    assert states(served) == {"tiny": "ready", "a": "ready", "b": "evicted"}
    assert (
        served.client.post("/api/v1/tokenize", json={"text": "x", "model": "b"}).status_code == 200
    )
    grown = served.client.post(
        f"/api/v1/looms/{loom}/nodes/0/generate",
        json={"max_tokens": 2, "wait": True, "model": "a"},
    )
    assert grown.status_code == 200, grown.text
    assert states(served) == {"tiny": "ready", "a": "ready", "b": "evicted"}
    for name in ("a", "b"):
        served.client.delete(f"/api/v1/models/{name}").raise_for_status()


@pytest.mark.parametrize("source", ["broken", "broken.gguf"])
def test_a_broken_model_evicts_nothing(served: Served, folder: Path, source: str) -> None:
    load(served, folder / "small", "a")
    assert load(served, folder / source, "bad", engine="auto")["status"] == "failed"
    assert states(served) == {"tiny": "ready", "a": "ready", "bad": "failed"}
    status, reply = complete(served, "bad")
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    for name in ("a", "bad"):
        served.client.delete(f"/api/v1/models/{name}").raise_for_status()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float99"),
        ("dtype", ""),
        ("engine", "jax"),
        ("kv_budget", -1),
        ("kv_budget", "much"),
        ("offload", 0),
    ],
)
def test_a_setting_that_no_engine_has_is_rejected_at_once(
    served: Served, folder: Path, name: str, value: Any
) -> None:
    body = {"source": str(folder / "small"), "id": "z", name: value}
    answer = served.client.post("/api/v1/models", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_parameter", name)
    assert "z" not in states(served)


def test_a_wrong_dtype_of_one_client_leaves_the_model_to_others(
    served: Served, folder: Path
) -> None:
    load(served, folder / "small", "a")
    load(served, folder / "small", "b")
    assert states(served)["a"] == "evicted"
    assert load(served, folder / "small", "a", dtype="float16")["status"] == "failed"
    assert states(served) == {"tiny": "ready", "a": "evicted", "b": "ready"}
    assert complete(served, "a")[0] == complete(served, "b")[0] == 200
    assert load(served, folder / "small", "c", dtype="float16")["status"] == "failed"
    assert complete(served, "c")[0] == 404
    assert load(served, folder / "small", "c")["status"] == "ok"
    assert complete(served, "c")[0] == 200
    for name in "abc":
        served.client.delete(f"/api/v1/models/{name}").raise_for_status()


def test_a_model_beyond_the_memory_budget_evicts_nothing(folder: Path) -> None:
    config = ServerConfig(
        port=0,
        model_roots=(folder,),
        memory_budget=160 << 20,
        kv_budget="16MiB",
        engine="numpy",
    )
    with serving(config) as served:
        load(served, folder / "small", "a")
        job = load(served, folder / "small", "b", kv_budget="1GiB")
        assert (job["status"], job["error"]["code"]) == ("failed", "out_of_memory")
        assert states(served) == {"tiny": "ready", "a": "ready", "b": "failed"}


def test_more_models_than_max_models_are_rejected() -> None:
    with pytest.raises(ConfigError, match="max_models is 2, .* started with 3 models"):
        ServerConfig(models=("tiny", "a", "b"), max_models=2)
    assert ServerConfig(models=tuple("abcde")).model_limit == 8


@pytest.mark.parametrize("is_open", [True, False], ids=["unloaded", "never loaded"])
def test_copy_and_clip_need_no_model(folder: Path, tmp_path: Path, is_open: bool) -> None:
    config = ServerConfig(
        port=0, db=f"sqlite:///{tmp_path}/looms.db", model_roots=(folder,), engine="numpy"
    )
    with ExitStack() as stack:
        served = stack.enter_context(serving(config))
        load(served, folder / "small", "a")
        client = served.client
        loom, other = (
            client.post("/api/v1/looms", json={"prompt": "Once", "model": "a"}).json()["id"]
            for _ in range(2)
        )
        grown = {"n": 2, "max_tokens": 4, "seed": 1, "wait": True}
        client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json=grown).raise_for_status()
        client.delete("/api/v1/models/a").raise_for_status()
        if not is_open:
            stack.pop_all().close()
            served = stack.enter_context(serving(config))
            client = served.client
        path = f"/api/v1/looms/{loom}/nodes/1"
        text = client.get(path).json()["text"]

        def copied(**body: Any) -> Json:
            answer = client.post(f"{path}/copy", json=body)
            assert answer.status_code == 201, answer.text
            return answer.json()

        copies = [copied(parent=2), copied(to_loom=other)]
        assert [name["added"][0]["text"] for name in copies] == [text, text]
        assert [name["added"][0]["n_tokens"] for name in copies] == [4, 4]
        third = copied(new_loom="anew")["id"]
        prompt = client.get(f"/api/v1/looms/{third}/nodes").json()["data"][0]["text"]
        assert prompt.endswith(text)
        for keep, status in ((4, 200), (2, 404 if not is_open else 200), (0, 200)):
            body = {"keep": keep, "children": "drop"}
            answer = client.post(f"{path}/clip", json=body)
            assert answer.status_code == status, answer.text
        assert client.get(path).json()["text"] == ""
        load(served, folder / "small", "a")
        for name in (loom, other, third):
            answer = client.post(f"/api/v1/looms/{name}/generate", json={**grown, "n": 1})
            assert answer.status_code == 200, answer.text
