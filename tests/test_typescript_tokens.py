"""The scanner of TypeScript in `tools/typescript_tokens.py`."""

import pytest

from tools.typescript_tokens import tokens


def texts(source: str, *, kind: str, jsx: bool = False) -> list[str]:
    return [token.text for token in tokens(source, jsx=jsx) if token.kind == kind]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a.b + this.c", ["a", "b", "this", "c"]),
        ("x = /'[/'\"]/g.test(y)", ["x", "test", "y"]),
        ("x = a / b / c", ["x", "a", "b", "c"]),
        ("`a ${b + `${c}`} d`", ["b", "c"]),
        ("'a' + \"b's\" + c", ["c"]),
    ],
)
def test_names_of_code_exclude_strings_and_regular_expressions(
    source: str, names: list[str]
) -> None:
    assert texts(source, kind="name") == names


def test_names_after_a_dot_are_fields_except_after_this() -> None:
    fields = [token.text for token in tokens("a.b + a?.c + this.d + ...e") if token.is_field]
    assert fields == ["b", "c"]


def test_comments_lose_their_marks_and_adjacent_lines_are_one() -> None:
    source = "/** One\n * two. */\n// Three\n  // four.\nx\n// Five."
    assert [(token.line, token.text) for token in tokens(source) if token.kind == "comment"] == [
        (1, "One\ntwo."),
        (3, "Three\nfour."),
        (6, "Five."),
    ]


def test_text_between_tags_is_a_string_and_code_after_a_type_is_not() -> None:
    source = "const a: Ref<B> = c\nreturn <p>\n  It’s {n} of <b>many</b> nodes\n</p>"
    assert [text.strip() for text in texts(source, kind="string", jsx=True)] == [
        *["It’s", "of", "many", "nodes"]
    ]
