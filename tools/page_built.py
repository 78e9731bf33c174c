"""Says whether the page in the package is what page/ makes, and how large it is: `make page-check`.

Run it after `make page`, in a checkout: files that this changed were not committed.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "src" / "weft" / "service" / "server" / "static"
TYPES = ROOT / "page" / "src" / "api" / "schema.d.ts"
MAX_BYTES = 300_000  # bytes of scripts and styles, packed as they are sent


def changed() -> list[str]:
    """Return the built files that differ from those of the last commit."""
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all", "--", BUILT, TYPES],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [line[3:] for line in status.stdout.splitlines()]


def packed(built: Path = BUILT) -> dict[str, int]:
    """Return the bytes of each script and style sheet as a browser fetches them."""
    return {
        file.name: len(gzip.compress(file.read_bytes(), mtime=0))
        for file in sorted(built.rglob("*"))
        if file.suffix in (".js", ".css", ".html")
    }


def main() -> int:
    """Print the sizes, and what is wrong to standard error. Returns the exit code."""
    sizes = packed()
    for name, n_bytes in sizes.items():
        print(f"{n_bytes:>8,} {name}")
    total = sum(sizes.values())
    print(f"{total:>8,} bytes packed, of at most {MAX_BYTES:,}; fonts come on top")
    files = changed()
    for file in files:
        print(f"{file}: not what page/ makes", file=sys.stderr)
    if files:
        print("run `make page` and commit what it writes", file=sys.stderr)
    if total > MAX_BYTES:
        print(f"the page is {total - MAX_BYTES:,} bytes too large", file=sys.stderr)
    return 1 if files or total > MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
