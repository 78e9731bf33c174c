"""Every name that N8Loom's users know exists here and stands on the page about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from weft.compat import n8loom

PAGE = (Path(__file__).parents[2] / "docs" / "n8loom.md").read_text(encoding="utf-8")

TABLES = PAGE[PAGE.index("## Loading") :]  # without the overview

EXPORTS = ["Loom", "Heddle", "load_for_loom"]
ATTRIBUTES = ["model", "tokenizer", "parent", "children", "tokens", "frag", "terminal", "text"]
# Names, and the parameters that documented calls pass by position or name.
METHODS = {
    "clip": ["token_limit"],
    "trim": ["token_trim"],
    "to_leaf": [],
    "add_child": ["child"],
    "add_text_child": ["text"],
    "remove_child": ["child"],
    "get_prefix_cache": [],
    "make_children": ["n", "temp", "max_tokens", "min_p", "stop_strings"],
    "make_child_stream": ["n", "temp", "max_tokens", "min_p", "stop_strings"],
    "ramify": ["arg"],
    "get_prefix_text": ["exclude"],
    "get_display_text": ["exclude"],
    "crown": [],
    "display_text": [],
    "get_prefix_tokens": ["exclude"],
    "apply_all_children": ["func", "apply_self", "leaves_only"],
    "at_all_leaves": ["func"],
    "apply_at_leaves": ["funcs"],
    "get_all_children": ["depth"],
    "get_all_leaves": [],
    "count_children": [],
    "count_leaves": [],
}
LOOM_ATTRIBUTES = ["user_prompt", "chat_template_used"]
FUNCTIONS = {
    "load_for_loom": [
        "path_or_hf_repo",
        "tokenizer_config",
        "model_config",
        "adapter_path",
        "lazy",
    ],
    "prompt_to_cache": ["model", "tokenizer", "prompt_ids", "c", "prefill_step_size", "offset"],
    "generate_batched": ["model", "tokenizer", "prompt", "batch_size"],
    "generate_batched_stream": ["model", "tokenizer", "prompt", "batch_size"],
    "frag_cache": ["cache", "start_idx", "end_idx"],
    "clip_frag": ["frags", "token_limit"],
    "frag_batch_gen": ["cache", "total_prompt_len", "generated_lengths"],
    "fuse_cache_frags": ["frags", "offset"],
}
GENERATE = {
    "prompt_cache", "verbose", "max_tokens", "temp", "top_p", "min_p", "min_tokens_to_keep",
    "repetition_penalty", "repetition_context_size", "prefill_step_size", "stop_strings",
}  # fmt: skip
CLASSES = ["KVFrag", "KVCache"]
KNOWN = [*EXPORTS, *ATTRIBUTES, *METHODS, *LOOM_ATTRIBUTES, *FUNCTIONS, *CLASSES]


@pytest.fixture(scope="module")
def loom() -> Iterator[weft.Loom]:
    with weft.load("tiny") as lm:
        yield n8loom.Loom(lm, lm.tokenizer, weft.samples.greeting)


@pytest.mark.parametrize("name", sorted(set(KNOWN)))
def test_page_has_the_name(name: str) -> None:
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE), name


@pytest.mark.parametrize("name", [*EXPORTS, *FUNCTIONS, *CLASSES])
def test_module_exports_the_name(name: str) -> None:
    assert name in n8loom.__all__
    assert callable(getattr(n8loom, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_takes_the_known_parameters_in_their_order(name: str) -> None:
    names = list(inspect.signature(getattr(n8loom, name)).parameters)
    assert names[: len(FUNCTIONS[name])] == FUNCTIONS[name]
    if name.startswith("generate_batched"):
        assert set(names) >= GENERATE


@pytest.mark.parametrize("name", METHODS)
def test_heddle_has_the_known_method(name: str) -> None:
    names = list(inspect.signature(getattr(n8loom.Heddle, name)).parameters)[1:]
    assert names[: len(METHODS[name])] == METHODS[name]


def test_node_has_the_known_attributes(loom: weft.Loom) -> None:
    child = loom.add_text_child(" there")
    assert [name for name in ATTRIBUTES if not hasattr(child, name)] == []
    assert [name for name in LOOM_ATTRIBUTES if not hasattr(loom, name)] == []


def test_alternatives_named_on_the_page_exist(loom: weft.Loom) -> None:
    """The second column of the tables."""
    offered = {
        name
        for cells in re.findall(r"^\|[^|]*\|([^|]*)\|", TABLES, re.MULTILINE)
        for name in re.findall(r"`(?:child\.|parent\.|weft\.)?([A-Za-z_]+)[^`]*`", cells)
    }
    assert len(offered) > 30
    homes = (loom, n8loom, weft)
    for name in offered - {"from", "repr", "mlx_lm"}:
        assert any(hasattr(home, name) for home in homes), name


def test_endpoints_named_on_the_page_exist() -> None:
    from weft.service.server.n8loom import router

    named = set(re.findall(r"`(?:POST )?(/[a-z_/]+)`", PAGE)) - {"/docs"}
    assert len(named) > 5
    assert named <= {route.path for route in router.routes}  # type: ignore[attr-defined]
