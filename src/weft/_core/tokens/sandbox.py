"""Limits on the work of chat templates, which are programs that come with a model.

Jinja's sandbox keeps them from Python and the machine, but not from endless work: nested loops,
texts that double, `"x" * 10**10`. Here each loop iteration and each call counts, and the size of
every text and list that a template creates is limited.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

TURNS = 10_000_000  # of loops, and calls
SIZE = 1 << 26  # characters of one text; an entry of a list counts as sixteen
TOTAL_SIZE = 1 << 31  # characters of all created values
WIDTH = 1 << 16  # the number that a text is filled or cut to
PATIENCE_S = 60.0
_BITS = 1 << 12  # of an integer
# A width or a precision of five digits, or one that comes from elsewhere.
_WIDE = re.compile(r"%[-+ #0]*\d*\.?(\d{5}|\*)|\{[^{}]*(\d{5}|\{)")
# Text methods and filters that make as much as a number says.
_FILLING = {"center", "ljust", "rjust", "zfill", "expandtabs", "batch", "slice", "indent"}
_FILLING |= {"wordwrap", "truncate", "tojson"}


class Limits:
    """The remaining budget of one rendering: loop iterations, calls, time, and sizes of values.

    given: lists that are arguments of the template, by id; the template may not modify them.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.given = frozenset(map(id, _nested_lists(names)))
        self.turns = TURNS
        self.result = 0
        self.until = time.monotonic() + PATIENCE_S

    def count_turn(self) -> None:
        """Count a loop iteration or a call. Raises: TemplateError if there were too many."""
        self.turns -= 1
        if self.turns < 0 or (self.turns % 1024 == 0 and time.monotonic() > self.until):
            raise TemplateRuntimeError("it does not come to an end")

    def count_size(self, size: int) -> None:
        """Count the size of a created value. Raises: TemplateError if the total is too large.

        size: characters or items.
        """
        self.result += size
        if size > SIZE or self.result > TOTAL_SIZE:
            raise _too_large()


_limits: ContextVar[Limits] = ContextVar("limits")


def compiled(template: str) -> Template:
    """Compile a template for `render`. Raises: TemplateError, and errors of Jinja."""
    return environment().from_string(_Counting().visit(environment().parse(template)))


def render(template: Template, names: dict[str, Any]) -> str:
    """Render a compiled template within the limits. Raises: TemplateError if it exceeds one.

    names: the variables of the template.
    """
    kept = _limits.set(Limits(names))
    try:
        return template.render(names)
    finally:
        _limits.reset(kept)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits, and with the filters and functions that Transformers adds."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if a template may use this attribute.

        Besides what Jinja's sandbox allows, a template may append to lists that it has created.
        """
        limits = _limits.get(None)
        if attr == "append" and isinstance(obj, list) and limits is not None:
            return id(obj) not in limits.given
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation within the size limits."""
        are_integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and are_integers and right * left.bit_length() > _BITS:
            raise _too_large()
        if operator == "*" and not are_integers:
            for value, n in ((left, right), (right, left)):
                if isinstance(n, int) and _size_of(value) * n > SIZE:
                    raise _too_large()
        if operator == "%" and isinstance(left, str):
            _check_result_size("format", left, [right])
        return check_size(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function in a template, and count the call."""
        _limits.get().count_turn()
        # `format` of a text comes wrapped by Jinja.
        method = getattr(__obj, "__wrapped__", __obj)
        of = getattr(method, "__self__", None)
        if isinstance(of, list):
            _limits.get().count_size(16)
        if isinstance(of, str):
            _check_result_size(method.__name__, of, [*args, *kwargs.values()])
        return check_size(super().call(__context, __obj, *args, **kwargs))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a block or macro, and check its size."""
        return _join("", parts)

    @staticmethod
    def counted(values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop, and count each iteration."""
        count_turn = _limits.get().count_turn
        for value in values:
            count_turn()
            yield value


class Generation(Extension):
    """Jinja extension: accept the `{% generation %}` tag, which marks text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes inside the block, without the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Rewrites a template: loops count iterations, `~` checks the size of its result."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call_node("counted", node, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_node("check_size", node, node)


def _call_node(name: str, at: nodes.Node, argument: Any) -> nodes.Expr:
    """Return a syntax node that calls a function of the environment.

    at: the node whose line the call gets.
    """
    result = nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)
    result.set_lineno(at.lineno).set_environment(environment())
    return result


@functools.cache
def environment() -> Sandbox:
    """Return the Jinja environment for chat templates, with the names that Transformers offers."""
    result = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    result.filters["tojson"] = _to_json
    result.filters = {name: _limit_filter(name, each) for name, each in result.filters.items()}
    result.globals.update({"raise_exception": _raise_template_error, "strftime_now": _strftime_now})
    del result.globals["lipsum"]
    result.check_size = check_size  # type: ignore[attr-defined]
    return result


def check_size(value: Any) -> Any:
    """Return `value`, which a template created; count its size. Raises: TemplateError."""
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise _too_large()
    _limits.get().count_size(_size_of(value))
    return value


def _nested_lists(value: Any) -> Iterator[list[Any]]:
    """Yield all lists in an argument of a template, nested ones included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            yield each
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()


def _size_of(value: Any) -> int:
    """Return the size of a value in characters; a list's entry counts as sixteen."""
    if isinstance(value, str | bytes):
        return len(value)
    return 16 * len(value) if isinstance(value, list | tuple | dict) else 0


def _limit_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: it counts as a call, and the size of its result is checked.

    name: the filter's name.
    """
    # Filters may be given the context or the environment first.
    at = 1 if hasattr(inner, "jinja_pass_arg") else 0

    @functools.wraps(inner)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _limits.get().count_turn()
        given = list(args)
        if name == "join" and len(given) > at:
            given[at] = list(Sandbox.counted(given[at]))
            between = kwargs.get("d", given[at + 1] if len(given) > at + 1 else "")
            _join(str(between), map(str, given[at]))
        elif len(given) > at:
            is_text = name in ("replace", "indent", "format")
            value = str(given[at]) if is_text else given[at]
            _check_result_size(name, value, [*given[at + 1 :], *kwargs.values()])
        return check_size(inner(*given, **kwargs))

    return limited


def _check_result_size(name: str, text: Any, given: Sequence[Any]) -> None:
    """Raise TemplateError if a method or filter of a text would create a too large result.

    Args:
        name: the method or filter.
        text: the text.
        given: its arguments.
    """
    size = 0
    if name in _FILLING and any(isinstance(n, int) and abs(n) > WIDTH for n in given):
        size = SIZE + 1
    elif name in ("format", "format_map") and _WIDE.search(str(text)):
        size = SIZE + 1
    elif name == "indent":
        wide = max((len(each) for each in given if isinstance(each, str)), default=WIDTH)
        size = text.count("\n") * wide if wide > 16 else 0
    elif name == "replace" and len(given) > 1:
        size = text.count(str(given[0])) * len(str(given[1]))
    elif name == "join" and given and isinstance(text, str):
        _join(text, map(str, Sandbox.counted(given[0])))
    if size > SIZE:
        raise _too_large()


def _join(between: str, parts: Iterable[str]) -> str:
    """`str.join` for templates, with a check of the result's size first."""
    size, kept = 0, []
    for part in parts:
        size += len(part) + len(between)
        if size > SIZE:
            raise _too_large()
        kept.append(part)
    return between.join(kept)


def _too_large() -> TemplateError:
    """Return the error for a value over a limit."""
    return TemplateRuntimeError("it makes a text, a list or a number that is too large")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter as Transformers defines it, without escapes for HTML."""
    # Not Jinja's own filter: that one escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_template_error(message: str) -> NoReturn:
    """The template function `raise_exception`."""
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """The template function `strftime_now`: the current time in a format."""
    return datetime.now().strftime(form)
