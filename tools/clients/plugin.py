"""A pytest plugin: the suite that it is loaded into finds Weft under genlm-backend's names."""

from __future__ import annotations

from weft.compat.genlm import install

install(replace=True)
