"""What a Transformers-format folder says about its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError

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
    generation = _read_json(path / "generation_config.json")
    return TokenizerFiles(
        backend=_read_backend(path),
        special_tokens=special,
        chat_template=_read_template(path, config),
        stop_ids=frozenset(id_list(generation.get("eos_token_id"))),
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
        named: dict[Any, Any] = dict(given)
    elif isinstance(given, Iterable):
        named = {entry.get("name"): entry.get("template") for entry in given}
    else:
        return None
    chosen = named.get("default")
    return chosen if isinstance(chosen, str) else None


def id_list(given: object) -> list[int]:
    """Return the ids of a setting that is one id, several, or none."""
    if given is None:
        return []
    return [int(given)] if isinstance(given, int) else [int(each) for each in _iterable(given)]


def _iterable(given: object) -> Iterable[Any]:
    if not isinstance(given, Iterable):
        raise ModelLoadError(f"eos_token_id is {given!r}; allowed is a token id or a list of them")
    return given


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{path} has no tokenizer.json. Weft reads tokenizers in that format only; "
            "Transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # The library raises plain Exception for every kind of broken file.
        raise ModelLoadError(
            f"{file} cannot be read as a tokenizer: {error}. Download the file again"
        ) from error


def _read_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return default_template(config.get("chat_template"))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is not readable JSON: {error}. Download it again") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file} holds {type(data).__name__}; a JSON object belongs there")
    return data
