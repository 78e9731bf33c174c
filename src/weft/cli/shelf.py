"""Where looms are kept: WEFT_HOME/looms/NAME.loom.json; and what was drawn last in each terminal.

The files are the truth. The index only says under which numbers the nodes of a loom were seen, and
for each terminal which loom was drawn there last, and where its reader stands; without it nothing
is lost. What reads and then writes does so under one lock, WEFT_HOME/.lock.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import files, samples
from ..errors import ConfigError, FormatError, StoreError
from ..viz.out import Out

if TYPE_CHECKING:
    from filelock import BaseFileLock

T = TypeVar("T")
SUFFIX = ".loom.json"
_WORDS, _LENGTH = 5, 40  # of a name
_SMALL = frozenset("a an the me my of to and in on for with is are it this that".split())
# What Windows keeps for its devices.
_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d")
_REMEMBERED = 64  # looms whose numbers are kept, and terminals
# What is said where files cannot be locked.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_PATIENCE_S = 2.0  # to wait for another command before that is said
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Seen:
    """A loom as it was drawn. at: id of the node last read or grown. numbers: ids by number."""

    at: str = ""
    numbers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Stand:
    """What was drawn last in a terminal, and the node last read or grown there."""

    loom: str
    at: str


@dataclass(slots=True)
class Index:
    """Looms by name, terminals by their mark; what was drawn last stands last."""

    looms: dict[str, Seen] = field(default_factory=dict)
    terminals: dict[str, Stand] = field(default_factory=dict)

    def put(self, mark: str, name: str, seen: Seen) -> None:
        """Note what was drawn in a terminal."""
        _put_last(self.looms, name, seen)
        _put_last(self.terminals, mark, Stand(name, seen.at))


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
        self.terminal = terminal()
        self._lock: BaseFileLock | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other command change anything here meanwhile. May be nested on one shelf.

        The system lets go of the lock of a process that dies. What killed commands have left is
        removed. Raises: StoreError where nothing can be written.
        """
        with _plainly(self.folder, "keep looms in"):
            self.looms.mkdir(parents=True, exist_ok=True)
            lock = self._lock = self._lock or _lock(self.folder)
            held = _acquire(lock)
        try:
            for folder in (self.folder, self.looms):
                files.sweep(folder)
            yield
        finally:
            if held:
                lock.release()

    @property
    def looms(self) -> Path:
        """Where the files are."""
        return self.folder / "looms"

    def path(self, name: str) -> Path:
        """Return the file of a loom, there or not."""
        return self.looms / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Return the looms' names, the one changed last first."""
        found: list[tuple[int, str]] = []
        with _plainly(self.folder, "read"):
            for file in _listed(self.looms):
                if file.name.endswith(SUFFIX) and not file.name.startswith("."):
                    status = _status(file)
                    if status is not None and stat.S_ISREG(status.st_mode):
                        found.append((-status.st_mtime_ns, file.name.removesuffix(SUFFIX)))
        return [name for _, name in sorted(found)]

    def known(self, name: str) -> str:
        """Return the name of a loom that is here. A file's path keeps a copy of it first."""
        if name in self.names():
            return name
        file = Path(name)
        if _is_file(file):
            from ..loom import Loom

            Loom.open(file)  # what is no loom is not kept
            return self._adopted(file)
        raise self.unknown(name)

    def unknown(self, name: str) -> ConfigError:
        """Return the error for a name that no loom has, with the nearest that there are."""
        names = self.names()
        near = difflib.get_close_matches(name, names, 3, 0.4)
        here = f"near it: {', '.join(near)}" if near else f"there are {', '.join(names[:3])}"
        if not names:
            here = "there is none yet"
        return ConfigError(f"there is no loom {name!r}; {here}", hint="weft ls lists them all")

    def own(self) -> str | None:
        """Return the loom drawn last in this terminal; None if there is none (any more)."""
        stand = self.index().terminals.get(self.terminal) if self.terminal else None
        return None if stand is None or stand.loom not in self.names() else stand.loom

    def anybodys(self) -> str:
        """Return the loom drawn last in any terminal, else the one changed last.

        Raises: StoreError for none.
        """
        names = self.names()
        if not names:
            raise StoreError(
                "there is no loom yet", hint=f'weft run "{samples.story}" -n 4 makes one'
            )
        drawn = [stand.loom for stand in self.index().terminals.values() if stand.loom in names]
        return drawn[-1] if drawn else names[0]

    def fresh_name(self, prompt: str) -> str:
        """Return a name that is not taken. It stays so while the shelf is locked."""
        taken = {file.name for file in _listed(self.looms)}
        names = _numbered(name_of(prompt))
        return next(name for name in names if f"{name}{SUFFIX}" not in taken)

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
        except files.FAULTS as error:
            raise FormatError(
                f"{path} is no saved loom, or is broken: {error}", hint=f"weft rm {name}"
            ) from error

    def index(self) -> Index:
        """Return the index; an empty one where there is none that can be read."""
        file = self.folder / "index.json"
        if not file.exists():
            return Index()
        try:
            data = files.read_json(file, FormatError, "no index")
            looms = {
                str(name): Seen(str(each["at"]), [str(node) for node in each["numbers"]])
                for name, each in data["looms"].items()
            }
            terminals = {
                str(mark): Stand(str(each["loom"]), str(each["at"]))
                for mark, each in data["terminals"].items()
            }
            return Index(looms, terminals)
        except (StoreError, *files.FAULTS) as error:
            _log.warning("the index in %s cannot be read and is made anew: %s", self.folder, error)
            return Index()

    def seen(self, name: str) -> Seen:
        """Return how a loom was drawn; where its reader stands in this terminal, if he does."""
        index = self.index()
        seen, stand = index.looms.get(name, Seen()), index.terminals.get(self.terminal)
        return Seen(stand.at, seen.numbers) if stand and stand.loom == name else seen

    def note(self, name: str, seen: Seen) -> list[str]:
        """Write in the index that this loom was drawn in this terminal; return its numbers.

        Numbers that another command has told meanwhile stay what they are.
        """
        with self.locked(), _plainly(self.folder, "write"):
            index = self.index()
            told = index.looms.get(name, Seen()).numbers
            if told[:1] == seen.numbers[:1]:  # not of another loom that had this name
                here = set(told)
                seen.numbers = told + [node for node in seen.numbers if node not in here]
            index.put(self.terminal, name, seen)
            files.write(self.folder / "index.json", json.dumps(asdict(index)) + "\n")
        return seen.numbers

    def remove(self, name: str) -> None:
        """Take a loom away; `restore` brings back what was taken last."""
        with self.locked(), _plainly(self.folder, "write"):
            self.path(name).replace(self._removed() / f"{name}{SUFFIX}")

    def remember(self, name: str) -> None:
        """Keep a copy of a loom's file for `restore`."""
        with self.locked(), _plainly(self.folder, "write"):
            files.write(self._removed() / f"{name}{SUFFIX}", files.read(self.path(name)))

    def forget_removed(self) -> None:
        """Delete for good what was removed before."""
        with self.locked(), _plainly(self.folder, "write"):
            for file in _listed(self.folder / "removed"):
                file.unlink(missing_ok=True)

    def removed(self) -> list[tuple[str, Path]]:
        """Return what was removed last: names and files."""
        with _plainly(self.folder, "read"):
            files = sorted(_listed(self.folder / "removed"))
        return [
            (file.name.removesuffix(SUFFIX), file) for file in files if file.name.endswith(SUFFIX)
        ]

    def restore(self, name: str) -> str:
        """Bring back a loom that was removed; return its name, another where its own is taken."""
        with self.locked(), _plainly(self.folder, "write"):
            new = name if name not in self.names() else self.fresh_name(name)
            (self.folder / "removed" / f"{name}{SUFFIX}").replace(self.path(new))
        return new

    def _removed(self) -> Path:
        folder = self.folder / "removed"
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep(folder)
        return folder

    def _adopted(self, file: Path) -> str:
        data = files.read(file)
        with self.locked(), _plainly(self.folder, "write"):
            name = self.fresh_name(file.name.removesuffix(SUFFIX).removesuffix(".json"))
            files.write(self.path(name), data)
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


def _put_last(kept: dict[str, T], key: str, value: T) -> None:
    kept.pop(key, None)
    kept[key] = value
    for old in list(kept)[:-_REMEMBERED]:
        del kept[old]


def _lock(folder: Path) -> BaseFileLock:
    from filelock import FileLock

    return FileLock(folder / ".lock")


def _acquire(lock: BaseFileLock) -> bool:
    """Wait for the lock; False where the file system has none."""
    from filelock import Timeout

    try:
        try:
            lock.acquire(_PATIENCE_S, poll_interval=0.01)
        except Timeout:
            out = Out.of(sys.stderr)
            out.line(("waiting for another weft command that writes looms; Ctrl-C ends it", "dim"))
            lock.acquire(-1, poll_interval=0.05)
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        _log.warning("commands at the same time may undo each other's work: %s", error)
        return False
    return True


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:  # gone meanwhile, or a link to nothing
        return None


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
    data = files.read(path)
    head, found, nodes = data.partition(b'\n "nodes": [\n')
    if found:
        # As Weft writes it: one line a node.
        first = nodes.partition(b"\n")[0].rstrip(b", ")
        n_nodes = 1 + nodes.count(b"\n  {")
        return files.parse_json(head.rstrip(b",") + b"}"), files.parse_json(first), n_nodes
    whole = files.parse_json(data)
    return whole, whole["nodes"][0], len(whole["nodes"])


def terminal() -> str:
    """Return a mark of the terminal; "" where none can be told.

    On Linux and macOS it is the session: every window, tab, tmux pane and login over ssh has its
    own, and what runs in one, scripts and pipelines too, has the same. A job without a terminal
    (cron, a service, a step of CI) has one for its own length; so has what a container was
    entered with, whose session is outside of it. On Windows it is the console.
    """
    marks = _console() if os.name == "nt" else _session()
    if not marks:
        return ""
    return hashlib.blake2b("\n".join(marks).encode(), digest_size=8).hexdigest()


def _session() -> list[str]:
    try:
        leader = _leader()
    except OSError:
        return []
    if leader <= 0:
        return []
    # A number is given again some day; when the leader began is not. macOS has no /proc: its
    # terminals name their tabs instead.
    began = _process_status(leader)[_BEGAN:][:1]
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip()
    return [str(leader), *began, boot or os.environ.get("TERM_SESSION_ID", "")]


def _leader() -> int:
    """Return the number of our session's leader, as /proc counts; 0 where it cannot be told.

    A container without a /proc of its own sees that of the system around it, where all have other
    numbers.
    """
    process, leader = os.getpid(), os.getsid(0)
    told = _read(Path("/proc/self/stat")).partition(" ")[0]
    if told and int(told) != process:
        process = int(told)
        leader = int(_process_status(process)[_SESSION])
    return leader or _first_inside(process)


def _first_inside(process: int) -> int:
    """Return the first process of a session whose leader is outside of our container."""
    while status := _process_status(process):
        parent = int(status[_PARENT])
        if _process_status(parent)[_SESSION:][:1] != ["0"]:
            return process
        process = parent
    return 0


# Where /proc/PID/stat says it, counted from behind the name.
_PARENT, _SESSION, _BEGAN = 1, 3, 19


def _process_status(process: int) -> list[str]:
    return _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()


def _console() -> list[str]:
    import ctypes

    window = ctypes.windll.kernel32.GetConsoleWindow()  # type: ignore[attr-defined]
    tab = os.environ.get("WT_SESSION", "")
    return [str(window), tab] if window or tab else []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
