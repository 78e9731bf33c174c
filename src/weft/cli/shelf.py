"""Where looms are kept: WEFT_HOME/looms/NAME.loom.json; and a small index of what was drawn last.

The files are the truth. The index only says which loom was drawn last, under which numbers its
nodes were seen, and where the reader stands; without it nothing is lost.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import files, samples
from ..errors import ConfigError, FormatError, StoreError

SUFFIX = ".loom.json"
_WORDS, _LENGTH = 5, 40  # of a name
_SMALL = frozenset("a an the me my of to and in on for with is are it this that".split())
# What Windows keeps for its devices.
_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Index:
    """loom: the one drawn last. at: id of the node last read or grown. numbers: ids by number."""

    loom: str = ""
    at: str = ""
    numbers: list[str] = field(default_factory=list)


class Summary(NamedTuple):
    """What the head of a loom's file says. model: what to load to grow it."""

    name: str
    model: str
    engine: str
    prompt: str
    created: str
    n_nodes: int
    changed_s: float


class Shelf:
    """The looms in one folder. Every write is atomic."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = home() if folder is None else folder

    @property
    def looms(self) -> Path:
        """Where the files are."""
        return self.folder / "looms"

    def path(self, name: str) -> Path:
        """Return the file of a loom, there or not."""
        return self.looms / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Return the looms' names, the one changed last first."""
        with _plainly(self.folder, "read"):
            files = [file for file in _listed(self.looms) if file.name.endswith(SUFFIX)]
            files.sort(key=lambda file: (-file.stat().st_mtime_ns, file.name))
        return [file.name.removesuffix(SUFFIX) for file in files if file.name[0] != "."]

    def known(self, name: str) -> str:
        """Return the name of a loom that is here. A file's path keeps a copy of it first."""
        if name in self.names():
            return name
        if name.endswith(SUFFIX) and Path(name).is_file():
            return self._adopted(Path(name))
        raise self.unknown(name)

    def unknown(self, name: str) -> ConfigError:
        """Return the error for a name that no loom has, with the nearest that there are."""
        names = self.names()
        near = difflib.get_close_matches(name, names, 3, 0.4)
        here = f"near it: {', '.join(near)}" if near else f"there are {', '.join(names[:3])}"
        if not names:
            here = "there is none yet"
        return ConfigError(f"there is no loom {name!r}; {here}", hint="weft ls lists them all")

    def last(self) -> str:
        """Return the loom drawn last, else the one changed last. Raises StoreError for none."""
        names, index = self.names(), self.index()
        if index.loom in names:
            return index.loom
        if not names:
            raise StoreError(
                "there is no loom yet", hint=f'weft run "{samples.story}" -n 4 makes one'
            )
        return names[0]

    def fresh_name(self, prompt: str) -> str:
        """Make and return a name that is not taken; an empty file holds its place."""
        stem = name_of(prompt)
        with _plainly(self.folder, "keep looms in"):
            self.looms.mkdir(parents=True, exist_ok=True)
            for name in _numbered(stem):
                try:
                    self.path(name).touch(exist_ok=False)
                except FileExistsError:
                    continue
                return name
        raise AssertionError("names do not run out")

    def summary(self, name: str) -> Summary:
        """Return what the head of a file says. Cost: O(file), without parsing its nodes."""
        path = self.path(name)
        try:
            head, first, n_nodes = _head(path)
            model, meta = head["model"], first.get("meta") or {}
            return Summary(
                name,
                str(meta.get("model") or model["name"]),
                str(meta.get("engine") or ""),
                str(head["prompt"]["user_prompt"]),
                str(head.get("created", "")),
                n_nodes,
                path.stat().st_mtime,
            )
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{path} is no saved loom, or is broken: {error}", hint=f"weft rm {name}"
            ) from error

    def index(self) -> Index:
        """Return the index; an empty one where there is none that can be read."""
        try:
            data = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
            numbers = [str(each) for each in data["numbers"]]
            return Index(str(data["loom"]), str(data["at"]), numbers)
        except FileNotFoundError:
            return Index()
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            _log.warning("the index in %s cannot be read and is made anew: %s", self.folder, error)
            return Index()

    def note(self, index: Index) -> None:
        """Write the index."""
        with _plainly(self.folder, "write"):
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write(self.folder / "index.json", json.dumps(asdict(index)) + "\n")

    def remove(self, name: str) -> None:
        """Take a loom away; `restore` brings back what was taken last."""
        self._keep_removed(name, self.path(name).replace)

    def remember(self, name: str) -> None:
        """Keep a copy of a loom's file for `restore`."""
        self._keep_removed(name, lambda to: shutil.copy2(self.path(name), to))

    def forget_removed(self) -> None:
        """Delete for good what was removed before."""
        with _plainly(self.folder, "write"):
            for file in _listed(self.folder / "removed"):
                file.unlink(missing_ok=True)

    def restore(self) -> list[str]:
        """Bring back what was removed last, under another name where its own is taken."""
        names = []
        with _plainly(self.folder, "write"):
            for file in sorted(_listed(self.folder / "removed")):
                name = self.fresh_name(file.name.removesuffix(SUFFIX))
                file.replace(self.path(name))
                names.append(name)
        if not names:
            raise StoreError("there is nothing to bring back", hint="weft ls")
        return names

    def _keep_removed(self, name: str, move: Any) -> None:
        removed = self.folder / "removed"
        with _plainly(self.folder, "write"):
            removed.mkdir(parents=True, exist_ok=True)
            move(removed / f"{name}{SUFFIX}")

    def _adopted(self, file: Path) -> str:
        name = self.fresh_name(file.name.removesuffix(SUFFIX))
        with _plainly(self.folder, "write"):
            shutil.copyfile(file, self.path(name))
        return name


def home() -> Path:
    """Return the folder for what the command keeps."""
    if given := os.environ.get("WEFT_HOME"):
        return Path(given).expanduser()
    from platformdirs import user_data_path

    return user_data_path("weft", appauthor=False)


def name_of(prompt: str) -> str:
    """Return a loom's name from its prompt: a few words that any file system takes."""
    text = unicodedata.normalize("NFKC", prompt).lower()[:500]
    words = [word for word in re.findall(r"[^\W_]+", text) if word not in _SMALL]
    name = "-".join(words[:_WORDS])
    while len(name) > _LENGTH and "-" in name:
        name = name.rpartition("-")[0]
    name = name[:_LENGTH]
    # Digits alone are a node's number.
    return (
        f"loom-{name}".rstrip("-")
        if name.isdigit() or _RESERVED.fullmatch(name)
        else name or "loom"
    )


@contextmanager
def _plainly(folder: Path, what: str) -> Iterator[None]:
    hint = "set WEFT_HOME to a folder that you can write"
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {what} {folder}: {error}", hint=hint) from error
    except StoreError as error:
        error.hint = error.hint or hint
        raise


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _numbered(stem: str) -> Iterator[str]:
    """Yield a name, then the name with .2, .3, …: a dot, since names end in numbers themselves."""
    yield stem
    match = re.fullmatch(r"(.+)\.(\d{1,6})", stem)
    base, n = (match[1], int(match[2])) if match else (stem, 1)
    while True:
        n += 1
        yield f"{base}.{n}"


def _head(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the head of a file, its first node, and how many nodes it has."""
    with path.open(encoding="utf-8") as file:
        head: list[str] = []
        for line in file:
            if line.rstrip() == ' "nodes": [':
                # As Weft writes it: one line a node.
                first = file.readline()
                n_nodes = 1 + sum(line.startswith("  {") for line in file)
                whole = "".join(head).rstrip().rstrip(",") + "}"
                return json.loads(whole), json.loads(first.strip().rstrip(",")), n_nodes
            head.append(line)
    data = json.loads("".join(head))
    return data, data["nodes"][0], len(data["nodes"])
