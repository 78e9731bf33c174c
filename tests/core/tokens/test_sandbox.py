"""Templates that loop forever or fill the memory raise; other templates have no limits."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from weft._core.tokens import sandbox
from weft._core.tokens.chat import check_variables, render_chat
from weft.errors import ConfigError

USER = [{"role": "user", "content": "Hi"}]
BIG = "{% set s = 'x' * 60000 %}"
LOOP = "{% for a in range(99999) %}"

ENDLESS = {
    "loops in loops": f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    "loops over texts": f"{BIG}{{% for a in s %}}{{% for b in s %}}{{% endfor %}}{{% endfor %}}",
    "recursive loops": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "macros": "{% macro m(n) %}{{ m(n - 1) }}{{ m(n - 1) }}{% endmacro %}{{ m(60) }}",
    "endless macros": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "filters": f"{LOOP}{LOOP}{{{{ a|upper }}}}{{% endfor %}}{{% endfor %}}",
    "joined loops": f"{LOOP}{{{{ range(99999)|join }}}}{{% endfor %}}",
    "a long range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "slices": "{{ [1]|slice(10 ** 9)|list }}",
    "powers": "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
    "squares": "{% set ns = namespace(n=3) %}" + LOOP + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
}
DOUBLED = "{% set ns = namespace(s='xy', l=[1]) %}{% for a in range(60) %}"
HUGE = {
    "a product": "{{ 'x' * 10 ** 9 }}",
    "a product of a list": "{{ ([0] * 10 ** 9)|length }}",
    "a product the other way": "{{ 10 ** 10 * 'x' }}",
    "~": DOUBLED + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "+": DOUBLED + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "+ of lists": DOUBLED + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "blocks": DOUBLED + "{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = b %}{% endfor %}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a star": "{{ '%*d' % (10 ** 9, 1) }}",
    "% precision": "{{ '%.1000000000f' % 1 }}",
    "the format filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000d}'.format(1) }}",
    "nested format": "{{ '{:{}d}'.format(1, 10 ** 9) }}",
    "center": "{{ 'x'|center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "indent": "{{ ('\n' * 60000)|indent('x' * 60000) }}",
    "indent by number": "{{ 'x\ny'|indent(10 ** 9) }}",
    "replace": BIG + "{{ s.replace('x', s) }}",
    "the replace filter": BIG + "{{ s|replace('x', s) }}",
    "join": BIG + "{{ s.join(s) }}",
    "the join filter": BIG + "{{ s|join(s) }}",
    "batch": "{{ [1]|batch(10 ** 9, 'x')|list }}",
    "tojson": "{{ [[1]]|tojson(indent=10 ** 9) }}",
    "output": BIG + LOOP + "{{ s }}{% endfor %}",
    "many texts": "{% set ns = namespace(l=[]) %}"
    + LOOP
    + "{% set ns.l = ns.l + ['x' * 600000 ~ a] %}{% endfor %}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_template_without_end_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "TURNS", 200_000)
    with pytest.raises(ConfigError, match="chat template rejected the messages in its line 1"):
        render_chat(ENDLESS[name], USER)


@pytest.mark.parametrize("name", HUGE)
def test_template_that_would_fill_the_memory_raises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SIZE", 1 << 20)
    monkeypatch.setattr(sandbox, "TOTAL_SIZE", 1 << 24)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"rejected the messages.*(too large|undefined)"):
            render_chat(HUGE[name], USER)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60e6


def test_template_that_runs_too_long_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATIENCE_S", 0.0)
    with pytest.raises(ConfigError, match="does not come to an end"):
        render_chat(ENDLESS["loops in loops"], USER)


@pytest.mark.parametrize(
    "template",
    ["{% if a %}" * 5000 + "{% endif %}" * 5000, "{{ " + "(" * 5000 + ")" * 5000 + " }}"],
)
def test_template_nested_too_deeply_raises(template: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        render_chat(template, USER)
    with pytest.raises(ConfigError, match="is no template"):
        check_variables(template, ["a"])


def test_error_names_the_line_that_failed() -> None:
    with pytest.raises(ConfigError, match="in its line 3: "):
        render_chat("\n\n{{ messages[5].content }}\n\n", USER)
    with pytest.raises(ConfigError, match="in its line 2: "):
        render_chat("\n{% if %}", USER)
    macro = "{% macro m() %}\n\n{{ raise_exception('no') }}{% endmacro %}\n\n{{ m() }}"
    with pytest.raises(ConfigError, match="in its line 3: no"):
        render_chat(macro, USER)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for a in [1, 2] %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% for a in [1, 2] %}{{ loop.length }}{{ loop.revindex }}{% endfor %}", "2221"),
        ("{% for a in 'ab' %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}", "ba"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "x1"),
        ("{% for a in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% for a in [[1, []]] recursive %}{{ a[0] }}{{ loop(a[1]) }}{% endfor %}", "1"),
        ("{% for a in [1, 2, 3] if a > 1 %}{{ a }}{% endfor %}", "23"),
        ("{{ [{'n': 'a'}, {'n': 'b'}]|join(', ', attribute='n') }}", "a, b"),
        ("{{ messages|map(attribute='content')|join }}", "Hi"),
        ("{{ 'Call 12345 at 100%%: %s {now}'|format('x') }}", "Call 12345 at 100%: x {now}"),
        ("{{ '%05.1f' % 2.5 }}{{ '{:>3}{}'.format(1, 1700000000) }}", "002.5  11700000000"),
        ("{{ 2 ** 10 }}{{ 3 * 'ab' }}{{ [1] * 2 }}", "1024ababab[1, 1]"),
        ("{{ 'a\nb'|indent(2) }}{{ 'ab'|center(4) }}|", "a\n  b ab |"),
        ("{{ x|default(1700000000) }}{{ 'aXa'|replace('a', 'b', 1) }}", "1700000000bXa"),
        ("{{ 'a' ~ 1 ~ none }}{{ [3, 1]|sort|first }}", "a1None1"),
        ("{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}"
         "{% call m(1) %}c{% endcall %}", "12c"),
    ],
)  # fmt: skip
def test_limits_change_no_other_template(template: str, text: str) -> None:
    assert render_chat(template, USER) == text


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "templates").iterdir()))
def test_real_templates_render_long_chats(file: Path) -> None:
    messages: list[dict[str, Any]] = []
    for n in range(2000):
        messages += [{"role": "user", "content": f"{n}?"}]
        messages += [{"role": "assistant", "content": "word " * 200}]
    text = render_chat(file.read_text("utf-8"), messages[:-1], bos_token="<s>", eos_token="</s>")
    assert len(text) > 1_900_000
