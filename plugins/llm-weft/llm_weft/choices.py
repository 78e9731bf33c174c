"""The models that a user has added, kept in llm's own folder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import llm


@dataclass(frozen=True, slots=True)
class Choice:
    """A model to load, and what it is called."""

    name: str
    model: str
    engine: str = "auto"
    kv_budget: str = "auto"

    @property
    def model_id(self) -> str:
        """The id that `llm -m` takes."""
        return f"weft/{self.name}"

    @classmethod
    def create(cls, model: str, name: str | None, engine: str, kv_budget: str) -> Choice:
        """Check a choice; a path becomes absolute. Raises: ClickException."""
        if os.path.exists(model):
            model = str(Path(model).resolve())
        if name is None:
            name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-")
            name = name.removesuffix(".gguf")
        if not re.fullmatch(r"[\w][\w.-]*", name):
            raise click.ClickException(f"a name is {name!r}; allowed are a-z, A-Z, digits, . _ -")
        if name == EMBEDDED.name:
            raise click.ClickException(f"{EMBEDDED.model_id} is the embedded model; give --name")
        return cls(name, model, engine, kv_budget)


EMBEDDED = Choice("tiny", "tiny")


def _file() -> Path:
    return Path(llm.user_dir()) / "weft-models.json"


def kept() -> list[Choice]:
    """Return the added choices, in order. A broken file is reported and left as it is."""
    try:
        rows = json.loads(_file().read_text(encoding="utf-8"))
        return [Choice(**row) for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        click.echo(f"{_file()} is not as it was written, and not used: {error}", err=True)
        return []


def keep(choice: Choice) -> Choice:
    """Add a choice, in place of one of the same name."""
    _write([*(each for each in _readable() if each.name != choice.name), choice])
    return choice


def drop(name: str) -> Choice:
    """Forget a choice, by its name or its id. Raises: ClickException for none such."""
    here = _readable()
    for choice in here:
        if name in (choice.name, choice.model_id):
            _write([other for other in here if other is not choice])
            return choice
    known = ", ".join(each.name for each in here) or "none"
    raise click.ClickException(f"no model {name!r} was added; there are: {known}")


def _readable() -> list[Choice]:
    """Return what was added, to be changed. Raises: ClickException for a file that is broken."""
    if _file().exists() and not kept():
        try:
            if json.loads(_file().read_text(encoding="utf-8")) == []:
                return []
        except (OSError, ValueError):
            pass
        raise click.ClickException(f"mend or remove {_file()} first")
    return kept()


def _write(choices: list[Choice]) -> None:
    part = _file().with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps([asdict(each) for each in choices], indent=1), encoding="utf-8")
    os.replace(part, _file())
