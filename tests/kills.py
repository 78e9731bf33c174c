"""Kills during writes: a process forks children and kills each of them at another place.

`python tests/kills.py NAMES FOLDER N SEED` runs these of `TRIALS`, each in a folder of its own with
N kills. It prints how often the old and the new state were there. In every other turn the child is
killed before one of its calls that touch the folder, else after a random time. The calls are drawn
without repeating. The model is loaded once, before the forks.
"""

from __future__ import annotations

import functools
import io
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

import typer.main

import weft
from searches import small, tree
from weft import Branch, Loom, samples
from weft._core import atomic_files
from weft.cli import chat, local_backend, run
from weft.cli.app import app
from weft.service.store import Library

Act = Callable[[], object]
NEVER = 1 << 30


class Child:
    """A forked child that does `act`; it kills itself before its nth call that touches `folder`."""

    def __init__(self, act: Act, folder: Path, *, before_call: int = NEVER) -> None:
        sys.stdout.flush()
        self._reports, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(act, folder, before_call, report)
        os.close(report)
        os.read(self._reports, 1)  # the child has started

    def wait(self, kill_after_s: float | None = None) -> int | None:
        """Return the number of the child's calls; None if it was killed."""
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(self._reports, "rb") as reports:
            n_calls = reports.read()
        assert code in (0, -signal.SIGKILL), f"the child failed with {code}"
        return int(n_calls) if code == 0 else None

    def _be(self, act: Act, folder: Path, before_call: int, report: int) -> None:
        code, calls = 1, count_calls(folder, before_call)
        try:
            os.write(report, b"x")
            act()
            os.write(report, str(len(calls)).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def count_calls(folder: Path, before_call: int) -> list[str]:
    """Note this process's calls that touch a folder; kill it before the nth."""
    name, calls = str(folder), list[str]()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        touches = any(isinstance(a, str | Path) and str(a).startswith(name) for a in arguments)
        if touches or event == "fcntl.flock":
            if len(calls) == before_call:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(event)

    sys.addaudithook(hook)
    return calls


class Trial:
    """One kind of write. `act(n)` brings the nth state; `state()` says which one is there.

    `state` opens all files, so it fails where one is neither the old nor the new one.
    adds: each `act` adds one to the state, whatever n is.
    """

    adds = False

    def __init__(self, folder: Path, lm: weft.LM) -> None:
        self.folder = folder
        self.file = folder / "file"
        self.lm = lm

    def act(self, n: int) -> None:
        raise NotImplementedError

    def state(self) -> int:
        raise NotImplementedError

    def run(self, n_kills: int, seed: int) -> Counter[str]:
        """Kill n times; after each kill the old or the new state must be there."""
        rng, counts, n = random.Random(seed), Counter[str](), 2
        self.done(0)
        self.done(1)
        began = time.perf_counter()
        n_calls, takes_s = self.done(2), time.perf_counter() - began
        calls: list[int] = []
        for turn in range(n_kills):
            old, n = self.state(), n + 1
            calls = calls or rng.sample(range(n_calls), n_calls)
            self.kill(n, calls.pop() if turn % 2 == 0 else None, rng.uniform(0, takes_s))
            now, new = self.state(), old + 1 if self.adds else n
            assert now in (old, new), f"turn {turn}: {now} is neither {old} nor {new}"
            counts["new" if now == new else "old"] += 1
        old = self.state()
        self.done(n + 1)
        assert self.state() == (old + 1 if self.adds else n + 1)
        left = list(self.folder.rglob("*.part"))
        assert not left, f"left behind: {left}"
        return counts

    def kill(self, n: int, before_call: int | None, after_s: float) -> None:
        """Let a child begin the nth state, and kill it before a call, or after a while."""
        at = NEVER if before_call is None else before_call
        child = Child(lambda: self.act(n), self.folder, before_call=at)
        child.wait(after_s if before_call is None else None)

    def done(self, n: int) -> int:
        """Let a child write the nth state; return the number of its calls."""
        n_calls = Child(lambda: self.act(n), self.folder).wait()
        assert n_calls is not None
        return n_calls


class Plain(Trial):
    """A file of text, by the helper that everything uses."""

    def act(self, n: int) -> None:
        atomic_files.write(self.file, (f"{n:8}" for _ in range(40_000)))

    def state(self) -> int:
        text = self.file.read_text()
        assert len(text) == 8 * 40_000
        assert text == text[:8] * 40_000
        return int(text[:8])


class Save(Trial):
    """`Loom.save`."""

    def act(self, n: int) -> None:
        loom = Loom(self.lm, [1, 2, 3])
        for token in range(200):
            loom.add([token, n])
        loom.meta["n"] = n
        loom.save(self.file)

    def state(self) -> int:
        loom = Loom.open(self.file, self.lm)
        assert len(loom.children) == 200
        return int(loom.meta["n"])


class SavedBranch(Trial):
    """`Branch.save`."""

    def act(self, n: int) -> None:
        branch = Branch.create(self.lm, seed=1)
        branch.prefill([n, *range(300)])
        branch.save(self.file)

    def state(self) -> int:
        tokens = Branch.load(self.lm, self.file).tokens
        assert tokens[1:] == list(range(300))
        return tokens[0]


class SavedKV(Trial):
    """`lm.kv.save`."""

    def act(self, n: int) -> None:
        self.lm.kv.save([n, *range(100)], self.file)

    def state(self) -> int:
        self.lm.clear_cache()
        ids = self.lm.kv.load(self.file).ids()
        assert ids[1:] == list(range(100))
        return ids[0]


class Command(Trial):
    """A verb of the command, on a WEFT_HOME of its own."""

    adds = True
    begin: tuple[str, ...] = ("run", "Tell me a story.", "-n", "2", "--max-tokens", "2")
    verb: tuple[str, ...]
    stdin = ""

    def __init__(self, folder: Path, lm: weft.LM) -> None:
        super().__init__(folder, lm)
        os.environ["WEFT_HOME"] = str(folder)
        for module in (run, local_backend, chat):
            module.load_model = lambda *_: lm  # type: ignore[attr-defined]
        Child(lambda: self.call(*self.begin), folder).wait()
        self.first = self.count()

    def call(self, *arguments: str) -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            sys.stdin = io.StringIO(self.stdin)
            app(list(arguments), standalone_mode=False)

    def act(self, n: int) -> None:
        self.call(*self.verb)

    def state(self) -> int:
        return self.count() - self.first

    def count(self) -> int:
        raise NotImplementedError

    def looms(self) -> dict[str, int]:
        """Open all looms; return how many nodes each has."""
        with closing(Library()) as library:
            return {
                row.name: library.open(row.id, self.lm).loom.count_children()
                for row in library.looms()
            }


class Run(Command):
    """`weft run`: one more loom, from its first token on."""

    verb = ("run", "Once upon a time", "-n", "1", "--max-tokens", "2")

    def count(self) -> int:
        return len(self.looms())


class Grow(Command):
    """`weft grow`: one more node, from its first token on."""

    verb = ("grow", "1", "-n", "1", "--max-tokens", "2", "--seed", "1", "--force")

    def count(self) -> int:
        (n_nodes,) = self.looms().values()
        return n_nodes


class Chat(Grow):
    """`weft chat`: one more turn; the message may be saved without an answer."""

    adds = False
    verb = ("chat", "-c", "--max-tokens", "2", "--seed", "1")
    stdin = "And then?\n"

    def run(self, n_kills: int, seed: int) -> Counter[str]:
        """Kill n times; no node is lost, and each turn adds two nodes or fewer."""
        rng, counts = random.Random(seed), Counter[str]()
        began = time.perf_counter()
        n_calls, takes_s = self.done(0), time.perf_counter() - began
        for turn in range(n_kills):
            old = self.state()
            at = rng.randrange(n_calls) if turn % 2 == 0 else None
            self.kill(0, at, rng.uniform(0, takes_s))
            n_new = self.state() - old
            assert n_new in (0, 1, 2), f"turn {turn}: {n_new} nodes"
            counts["new" if n_new else "old"] += 1
        old = self.state()
        self.done(0)
        assert self.state() == old + 2
        return counts


class Resume(Trial):
    """A search with `resume=`: broken off anywhere, it ends as it would have without."""

    def act(self, n: int) -> None:
        small("tot", self.lm, samples.game24, resume=self.file)

    def run(self, n_kills: int, seed: int) -> Counter[str]:
        rng, counts = random.Random(seed), Counter[str]()
        began = time.perf_counter()
        n_calls, takes_s = self.done(0), time.perf_counter() - began
        want = self.tree()
        self.file.unlink()
        last = 0
        for turn in range(n_kills):
            self.kill(0, rng.randrange(n_calls) if turn % 2 == 0 else None, rng.uniform(0, takes_s))
            loom = Loom.open(self.file, self.lm) if self.file.exists() else None
            kept = {"round": 0, "done": False} if loom is None else loom.meta["search"]
            assert kept["round"] >= last
            counts["new" if kept["round"] > last else "old"] += 1
            last = kept["round"]
            if kept["done"]:
                assert self.tree() == want
                self.file.unlink()
                last = 0
        self.done(0)
        assert self.tree() == want
        assert not list(self.folder.rglob("*.part"))
        return counts

    def tree(self) -> list[tuple[str, float, str | None]]:
        # What is computed again is computed in other batches, and rounded in other ways.
        nodes = tree(Loom.open(self.file, self.lm))
        return [(text, round(score or 0.0, 5), end) for text, score, end in nodes]


TRIALS: dict[str, type[Trial]] = {
    "plain": Plain,
    "save": Save,
    "branch": SavedBranch,
    "kv": SavedKV,
    "run": Run,
    "grow": Grow,
    "chat": Chat,
    "resume": Resume,
}


def main() -> None:
    names, folder, n_kills, seed = sys.argv[1:]
    # The parser, from the signatures of the verbs, is the same for all.
    typer.main.get_command = functools.cache(typer.main.get_command)
    lm = weft.load("tiny")
    for name in names.split(","):
        (Path(folder) / name).mkdir()
        counts = TRIALS[name](Path(folder) / name, lm).run(int(n_kills), int(seed))
        print(name, counts["old"], counts["new"], flush=True)


if __name__ == "__main__":
    main()
