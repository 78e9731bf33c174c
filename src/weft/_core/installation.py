"""Commands that install Weft and its extras, and the entry points of installed packages."""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .. import DISTRIBUTION, PIP_TARGET


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of one of Weft's extras.

    Until the distribution is on PyPI, the command names the folder, wheel or repository from which
    this copy was installed. So it works in any working directory.
    """
    return pip_install(installed_from(), extra)


def pip_install(target: str, extra: str = "") -> str:
    """Return the pip command for a target: a name, a path, or a version-control URL."""
    extras = f"[{extra}]" if extra else ""
    if "+" in target.partition("://")[0] and "://" in target:
        return f'pip install "{DISTRIBUTION}{extras} @ {target}"'
    requirement = f"{target}{extras}"
    return f'pip install "{requirement}"' if extras or " " in target else f"pip install {target}"


def installed_from() -> str:
    """Return the name, path or version-control URL with which pip installs this copy of Weft.

    That is `weft.PIP_TARGET` if it is the name on PyPI, or if the origin of this copy is unknown.
    """
    if PIP_TARGET == DISTRIBUTION:
        return DISTRIBUTION
    try:
        record = distribution(DISTRIBUTION).read_text("direct_url.json")  # written by pip, PEP 610
    except PackageNotFoundError:
        record = None
    if record is None:
        return PIP_TARGET
    origin = json.loads(record)
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{origin['url']}"
    path = url2pathname(urlsplit(origin["url"]).path)
    return path if Path(path).exists() else PIP_TARGET


def entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group that installed packages have.

    Reading those of all packages takes 10 ms and more. The result is kept until an installation
    changes a folder of `sys.path`.
    """
    return _entry_points(group, tuple((path, _modified(path)) for path in sys.path))


@lru_cache(maxsize=8)
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    return metadata.entry_points(group=group)


def _modified(path: str) -> int:
    """Return the time at which a folder or archive was changed; 0 if there is none."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0
