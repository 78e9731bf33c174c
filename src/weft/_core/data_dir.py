"""The folder of Weft's data."""

from __future__ import annotations

import os
from pathlib import Path


def data_dir() -> Path:
    """Return the folder: WEFT_HOME, else the system's place for user data."""
    if given := os.environ.get("WEFT_HOME"):
        return Path(given).expanduser()
    from platformdirs import user_data_path

    return user_data_path("weft", appauthor=False)
