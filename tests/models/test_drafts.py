"""Drafts from earlier text on a real model."""

from __future__ import annotations

from models.conftest import Load
from rig import verify_always
from weft import Loom

CODE = "".join(
    f"    def get_{name}(self):\n        return self._{name}\n\n"
    for name in ("width", "height", "depth", "weight")
)


def test_drafts_of_repetitive_code_change_no_token(load_real: Load) -> None:
    lm = load_real("smollm2-numpy")
    options = {"n": 1, "max_tokens": 24, "temperature": 0.0, "show": False}
    (expected,) = Loom(lm, CODE, template=False).grow(**options)
    lm.clear_cache()
    lm.draft = "lookup"
    try:
        verify_always(lm.scheduler)
        before = lm.stats()
        (node,) = Loom(lm, CODE, template=False).grow(**options)
        after = lm.stats()
    finally:
        lm.draft = None
    assert node.tokens == expected.tokens
    assert after.draft_accepted > before.draft_accepted
    assert after.steps - before.steps < len(node.tokens)
