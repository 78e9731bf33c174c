"""Whole-number arithmetic: one step, and full expressions read without running them."""

from __future__ import annotations

import ast
from fractions import Fraction

LONGEST = 200


class NotArithmetic(ValueError):
    """The text has other parts than whole numbers, + - * / and brackets, or divides by zero."""


def step(left: int, op: str, right: int) -> int:
    """Return `left op right`; a division leaves its remainder behind."""
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    return left * right if op == "*" else left // right


def evaluate(text: str) -> Fraction:
    """Return the exact value of an expression. Raises NotArithmetic."""
    if len(text) > LONGEST:
        raise NotArithmetic(f"longer than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise NotArithmetic(f"not an expression: {text!r}") from error
    return _value(tree.body)


def numbers_in(text: str) -> list[int]:
    """Return the whole numbers of an expression, sorted. Raises NotArithmetic."""
    evaluate(text)
    nodes = ast.walk(ast.parse(text.strip(), mode="eval"))
    return sorted(node.value for node in nodes if _is_number(node))  # type: ignore[attr-defined]


def _value(node: ast.expr) -> Fraction:
    if _is_number(node):
        return Fraction(node.value)  # type: ignore[attr-defined]
    if not isinstance(node, ast.BinOp):
        raise NotArithmetic(f"{type(node).__name__} is not arithmetic")
    left, right = _value(node.left), _value(node.right)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() if right:
            return left / right
    raise NotArithmetic(f"{type(node.op).__name__} of {left} and {right} is not allowed")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
