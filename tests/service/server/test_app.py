"""The ASGI application."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from serving import serving


def test_first_request_creates_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the routes are created once, when their modules are imported."""
    created: list[object] = []
    create = TypeAdapter.__init__

    def count(self: Any, *given: Any, **options: Any) -> None:
        created.append(given)
        create(self, *given, **options)

    with serving() as served:
        monkeypatch.setattr(TypeAdapter, "__init__", count)
        assert served.client.get("/api/v1/server").status_code == 200
    assert created == []
