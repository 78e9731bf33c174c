"""Tries over the bytes of a vocabulary: the weight of every prefix from the weights of tokens."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...tokens.token import Token

Weights = NDArray[np.float64]
Edge = int | tuple[None, int]


class TokenCharacterTrie:
    """A trie with an edge a byte and a leaf a token; nodes are numbered children first, root last.

    decode: the vocabulary. children[node]: edge → node; a leaf's edge is (None, id). word2leaf,
    leaf2word: between entries and leaves; the key of a `Token` is (bytes, id). idx_to_leaf: int32
    [V, 2], (id, leaf). ordering: nodes, children first. node2prefix: the bytes before a node.
    Weights are float64, one a node.
    """

    def __init__(self, decode: Sequence[Any]) -> None:
        self.decode = list(decode)
        nodes: list[dict[Edge, int]] = [{}]
        leaves: dict[Any, int] = {}
        owners: list[int] = []
        plain = False
        for number, word in enumerate(self.decode):
            key, letters, token_id = _spelled(word, number)
            plain = plain or key is word
            if key in leaves:
                raise ConfigError(f"Duplicate word in vocabulary: {word!r}")
            at = 0
            for letter in letters:
                at = _child(nodes, at, letter)
            leaf = _child(nodes, at, (None, token_id))
            leaves[key] = leaf
            owners.append(leaf)
        if plain:
            warnings.warn(
                "give Tokens: plain bytes cannot keep tokens of equal bytes apart",
                DeprecationWarning,
                stacklevel=2,
            )
        self._number(nodes, leaves, owners)

    def _number(
        self, nodes: list[dict[Edge, int]], leaves: dict[Any, int], owners: list[int]
    ) -> None:
        """Number nodes children first, so that one pass in order sums up."""
        order: list[int] = []
        stack = [0]
        while stack:
            at = stack.pop()
            order.append(at)
            stack += nodes[at].values()
        new = {old: number for number, old in enumerate(reversed(order))}
        self.children: list[dict[Edge, int]] = [{} for _ in nodes]
        for old, edges in enumerate(nodes):
            self.children[new[old]] = {edge: new[below] for edge, below in edges.items()}
        self.root = new[0]
        self.word2leaf = {word: new[leaf] for word, leaf in leaves.items()}
        self.leaf2word = {leaf: word for word, leaf in self.word2leaf.items()}
        ids = [_spelled(word, number)[2] for number, word in enumerate(self.decode)]
        pairs = [(token_id, new[leaf]) for token_id, leaf in zip(ids, owners, strict=True)]
        self.idx_to_leaf = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        self.ordering = np.arange(len(nodes))
        self.jump = [np.array(sorted(edges.values()), dtype=np.int32) for edges in self.children]
        self._parents = np.full(len(nodes), -1, dtype=np.int64)
        for at, edges in enumerate(self.children):
            for below in edges.values():
                self._parents[below] = at
        self._levels = self._by_depth()
        self.node2prefix = self._prefixes()

    def _by_depth(self) -> list[NDArray[np.int64]]:
        """Return the nodes of each depth but the root's, deepest first."""
        depth = np.zeros(len(self.children), dtype=np.int64)
        for at in range(len(depth) - 2, -1, -1):  # parents have larger numbers
            depth[at] = depth[self._parents[at]] + 1
        order = np.argsort(depth, kind="stable")
        cuts = np.searchsorted(depth[order], np.arange(1, depth.max(initial=0) + 1))
        return [part for part in np.split(order, cuts)[:0:-1] if part.size]

    def _prefixes(self) -> dict[int, Any]:
        prefixes: dict[int, Any] = {self.root: b""}
        stack = [self.root]
        while stack:
            at = stack.pop()
            for edge, below in self.children[at].items():
                own = b"" if isinstance(edge, tuple) else bytes((edge,))
                prefixes[below] = prefixes[at] + own
                stack.append(below)
        return prefixes

    def weight_sum(self, ws: Any) -> Weights:
        """Return for every node the sum of its tokens' weights: float64 [nodes]."""
        return self.batch_weight_sum([ws])[0]

    def weight_max(self, ws: Any) -> Weights:
        """Return for every node the largest of its tokens' weights, negative ones too."""
        return self.batch_weight_max([ws])[0]

    def batch_weight_sum(self, ws: Any) -> Weights:
        """The same for many rows of weights: [B, V] → float64 [B, nodes]."""
        out = self._leaves(ws, 0.0)
        for level in self._levels:
            np.add.at(out.T, self._parents[level], out.T[level])
        return out

    def batch_weight_max(self, ws: Any) -> Weights:
        """The same for many rows of weights: [B, V] → float64 [B, nodes]."""
        out = self._leaves(ws, -np.inf)
        for level in self._levels:
            np.maximum.at(out.T, self._parents[level], out.T[level])
        return out

    def _leaves(self, ws: Any, empty: float) -> Weights:
        rows = np.stack([_array(row) for row in ws])
        if rows.shape[1] != len(self.decode):
            raise ConfigError(
                f"{rows.shape[1]} weights for {len(self.decode)} words; give one each"
            )
        out = np.full((len(rows), len(self.children)), empty, dtype=np.float64)
        out[:, self.idx_to_leaf[:, 1]] = rows
        return out

    def visualize(self, ws: Any = None) -> str:
        """Return the trie as Graphviz DOT; `ws`: weights of nodes, written beside them."""
        lines = ["digraph trie {"]
        for at, edges in enumerate(self.children):
            weight = "" if ws is None else f"\\n{float(ws[at]):.4f}"
            lines.append(f'  {at} [label="{at}{weight}"];')
            for edge, below in edges.items():
                shown = "end" if isinstance(edge, tuple) else ascii(chr(edge))[1:-1]
                lines.append(f'  {at} -> {below} [label="{shown}"];'.replace("\\x", "\\\\x"))
        return "\n".join([*lines, "}"])


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """The same in float32, as the known one gives it. device: "cpu", "cuda" or None."""

    def __init__(self, decode: Sequence[Any], device: str | None = None) -> None:
        if device not in ("cpu", "cuda", None):
            raise ConfigError(f"device is {device!r}; allowed are 'cpu', 'cuda' and None")
        super().__init__(decode)
        self.device = device or "cpu"

    def batch_weight_sum(self, ws: Any) -> Any:
        """See the base class: float32."""
        return super().batch_weight_sum(ws).astype(np.float32)

    def batch_weight_max(self, ws: Any) -> Any:
        """See the base class: float32."""
        return super().batch_weight_max(ws).astype(np.float32)


class AsyncTokenCharacterTrie:
    """A trie whose callers of one loop pass share one call. No task to start; none can hang."""

    def __init__(self, trie: TokenCharacterTrie) -> None:
        self.trie = trie
        self._waiting: dict[Any, list[tuple[str, Any, asyncio.Future[Any]]]] = {}

    @classmethod
    def from_vocab(
        cls, vocab: Sequence[Any], backend: str = "parallel", **kwargs: Any
    ) -> AsyncTokenCharacterTrie:
        """Return one over a vocabulary. backend: "parallel" or "sequential"."""
        kinds = {"parallel": ParallelTokenCharacterTrie, "sequential": TokenCharacterTrie}
        if backend not in kinds:
            raise ConfigError(f"Unknown backend: {backend!r}; allowed are {', '.join(kinds)}")
        return cls(kinds[backend](vocab, **kwargs))

    async def weight_sum(self, ws: Any) -> Any:
        """See `TokenCharacterTrie.weight_sum`."""
        return await self._ask("sum", ws)

    async def weight_max(self, ws: Any) -> Any:
        """See `TokenCharacterTrie.weight_max`."""
        return await self._ask("max", ws)

    async def _ask(self, kind: str, ws: Any) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiting = self._waiting.setdefault(loop, [])
        waiting.append((kind, ws, future))
        if len(waiting) == 1:
            loop.call_soon(self._answer, loop)
        return await future

    def _answer(self, loop: asyncio.AbstractEventLoop) -> None:
        asked = [each for each in self._waiting.pop(loop, []) if not each[2].done()]
        for kind in ("sum", "max"):
            chosen = [(ws, future) for name, ws, future in asked if name == kind]
            if chosen:
                self._answer_kind(kind, chosen)

    def _answer_kind(self, kind: str, asked: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        call = self.trie.batch_weight_sum if kind == "sum" else self.trie.batch_weight_max
        try:
            rows = call([ws for ws, _ in asked])
        except Exception as error:
            if len(asked) == 1:
                asked[0][1].set_exception(error)
                return
            for each in asked:  # the error is one caller's own
                self._answer_kind(kind, [each])
            return
        for (_, future), row in zip(asked, rows, strict=True):
            future.set_result(row)

    def start(self) -> None:
        """Nothing is to be started."""

    async def cleanup(self) -> None:
        """Nothing is to be ended."""

    def shutdown(self) -> None:
        """Nothing is to be ended."""


def _child(nodes: list[dict[Edge, int]], at: int, edge: Edge) -> int:
    below = nodes[at].get(edge)
    if below is None:
        below = nodes[at][edge] = len(nodes)
        nodes.append({})
    return below


def _spelled(word: Any, number: int) -> tuple[Any, bytes, int]:
    """Return an entry's key, bytes and id."""
    if isinstance(word, Token):
        return (word.byte_string, word.token_id), word.byte_string, word.token_id
    return word, word.encode() if isinstance(word, str) else bytes(word), number


def _array(row: Any) -> NDArray[np.float64]:
    if hasattr(row, "detach"):
        row = row.detach().cpu().numpy()
    return np.asarray(row, dtype=np.float64)
