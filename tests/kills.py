"""Writes that are killed: a process of its own forks children, each of which is killed somewhere.

`python tests/kills.py NAME FOLDER N SEED` runs one of `TRIALS` in FOLDER with N kills, and prints
how often the old and the new state were found. A child is killed before one of the calls by which
it touches FOLDER, and in the next turn after a while; the calls are drawn without repeating.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Act = Callable[[], object]
NEVER = 1 << 30


class Child:
    """A forked child that does `act`; it kills itself before its nth call that touches `folder`."""

    def __init__(self, act: Act, folder: Path, *, before_call: int = NEVER) -> None:
        sys.stdout.flush()
        self._told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(act, folder, before_call, tell)
        os.close(tell)
        os.read(self._told, 1)  # it has begun

    def wait(self, kill_after_s: float | None = None) -> int | None:
        """Return how many calls it made; None if it was killed."""
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(self._told, "rb") as told:
            n_calls = told.read()
        assert code in (0, -signal.SIGKILL), f"the child failed with {code}"
        return int(n_calls) if code == 0 else None

    def _be(self, act: Act, folder: Path, before_call: int, tell: int) -> None:
        code, calls = 1, count_calls(folder, before_call)
        try:
            os.write(tell, b"x")
            act()
            os.write(tell, str(len(calls)).encode())
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

    It opens all files, so it fails where one is neither the old nor the new one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def act(self, n: int) -> None:
        raise NotImplementedError

    def state(self) -> int:
        raise NotImplementedError

    def run(self, n_kills: int, seed: int) -> Counter[str]:
        """Kill n times; after each kill the old or the new state must be there."""
        rng, found, n = random.Random(seed), Counter[str](), 2
        self.done(0)
        self.done(1)
        began = time.perf_counter()
        n_calls, takes_s = self.done(2), time.perf_counter() - began
        calls: list[int] = []
        for turn in range(n_kills):
            old, n = self.state(), n + 1
            calls = calls or rng.sample(range(n_calls), n_calls)
            at_call = turn % 2 == 0
            child = Child(
                lambda n=n: self.act(n), self.folder, before_call=calls.pop() if at_call else NEVER
            )
            child.wait(None if at_call else rng.uniform(0, takes_s))
            now = self.state()
            assert now in (old, n), f"turn {turn}: {now} is neither {old} nor {n}"
            found["new" if now == n else "old"] += 1
        self.done(n + 1)
        assert self.state() == n + 1
        left = list(self.folder.rglob("*.part"))
        assert not left, f"left behind: {left}"
        return found

    def done(self, n: int) -> int:
        """Let a child bring the nth state to its end; return how many calls it made."""
        n_calls = Child(lambda: self.act(n), self.folder).wait()
        assert n_calls is not None
        return n_calls


class Plain(Trial):
    """A file of text, by the helper that everything uses."""

    def act(self, n: int) -> None:
        files.write(self.folder / "x", (f"{n:8}" for _ in range(40_000)))

    def state(self) -> int:
        text = (self.folder / "x").read_text()
        assert len(text) == 8 * 40_000
        assert text == text[:8] * 40_000
        return int(text[:8])


TRIALS: dict[str, type[Trial]] = {"plain": Plain}


def main() -> None:
    name, folder, n_kills, seed = sys.argv[1:]
    found = TRIALS[name](Path(folder)).run(int(n_kills), int(seed))
    print(f"{found['old']} {found['new']}")


if __name__ == "__main__":
    from weft import files

    main()
