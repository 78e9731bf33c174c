"""What a Transformers-format folder says about its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError
from ..files import read, read_json, read_text, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parts of a tokenizer, read and checked.

    special_tokens: name → text, such as "eos_token" → "</s>".
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_template: str | None
    stop_ids: frozenset[int]


def read_folder(path: Path) -> TokenizerFiles:
    """Read tokenizer.json and, where there are such, the files beside it.

    Raises: ModelLoadError naming the file that is missing or broken.
    """
    config = _read_json(path / "tokenizer_config.json")
    special = special_texts(_read_json(path / "special_tokens_map.json"))
    special.update(special_texts(config))
    file = path / "generation_config.json"
    try:
        stop_ids = id_list(_read_json(file).get("eos_token_id"))
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return TokenizerFiles(
        backend=_read_backend(path),
        special_tokens=special,
        chat_template=_read_template(path, config),
        stop_ids=frozenset(stop_ids),
    )


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a configuration names, as text."""
    texts = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def default_template(given: object) -> str | None:
    """Return the template of a setting that is one template, or several with names."""
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        chosen = given.get("default")
    elif isinstance(given, list | tuple):
        named = [each for each in given if isinstance(each, Mapping)]
        chosen = next((e.get("template") for e in named if e.get("name") == "default"), None)
    else:
        return None
    return chosen if isinstance(chosen, str) else None


def id_list(given: object) -> list[int]:
    """Return the ids of a setting that is one id, several, or none. Raises: ModelLoadError."""
    if given is None:
        return []
    ids: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            raise ModelLoadError(
                f"eos_token_id is {shown(given)}; allowed is a token id or a list of them"
            )
    return ids


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{path} has no tokenizer.json. Weft reads tokenizers in that format only; "
            "Transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    data = read(file, ModelLoadError)
    try:
        backend = Backend.from_buffer(data)
        backend.encode("a")  # or a part that is missing is missed by every prompt
        return backend
    except BaseException as error:
        if not is_librarys(error):
            raise
        raise ModelLoadError(
            f"{file} cannot be read as a tokenizer: {error}. Download the file again"
        ) from error


def is_librarys(error: BaseException) -> bool:
    """Whether the tokenizers library gave up: by a plain Exception, or by a panic of its Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file, ModelLoadError)
    return default_template(config.get("chat_template"))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    data = read_json(file, ModelLoadError, "not readable JSON", nan=True)
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file} holds {type(data).__name__}; a JSON object belongs there")
    return data
