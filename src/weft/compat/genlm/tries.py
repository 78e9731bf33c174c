"""Tries over the bytes of a vocabulary: weights of all prefixes from weights of tokens."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core.tokens.codec import Token
from ...errors import ConfigError
from .models import HAS_TORCH

Weights = NDArray[np.float64]
Ints = NDArray[np.int64]


class TokenCharacterTrie:
    """A trie over the bytes or characters of a vocabulary: weights of tokens → weights of prefixes.

    Use it to turn next-token probabilities into probabilities of next bytes. Each edge is labelled
    with one byte or character, and each vocabulary entry has its own leaf. Nodes are numbered so
    that children have smaller numbers than their parents.

    Attributes:
        decode: the vocabulary: Tokens, whose labels are their bytes, or other iterables of labels.
        children: for each node, a dict from label to child. The label of a leaf's edge is
            (None, position of the entry in `decode`).
        word2leaf: from an entry's key to its leaf. The key of a `Token` is (bytes, id); other
            entries are their own key.
        leaf2word: the inverse of `word2leaf`.
        idx_to_leaf: int32 [V, 2]: (position of the entry, leaf).
        ordering: the inner nodes, children before parents.
    """

    def __init__(self, decode: Sequence[Any]) -> None:
        self.decode = list(decode)
        if any(map(Token.is_plain_bytes, self.decode)):
            warnings.warn(
                "Passing plain bytes to TokenCharacterTrie is deprecated: they cannot keep tokens"
                " of equal bytes apart; give Tokens",
                DeprecationWarning,
                stacklevel=2,
            )
        nodes: list[dict[Hashable, int]] = [{}]
        leaves: dict[Hashable, int] = {}
        for position, entry in enumerate(self.decode):
            key, symbols = _key_and_edges(entry)
            if key in leaves:
                raise ConfigError(f"Duplicate word in vocabulary: {key!r}")
            node = 0
            for symbol in symbols:
                node = _get_or_add_child(nodes, node, symbol)
            leaves[key] = _get_or_add_child(nodes, node, (None, position))
        self._renumber(nodes, leaves)

    def _renumber(self, nodes: list[dict[Hashable, int]], leaves: dict[Hashable, int]) -> None:
        """Set the attributes, with nodes numbered so that children precede their parents.

        One pass in that order then computes all sums.

        Args:
            nodes: for each node, a dict from label to child, in the order of creation.
            leaves: from an entry's key to its leaf.
        """
        order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += nodes[node].values()
        new = {old: number for number, old in enumerate(reversed(order))}
        self.children: list[dict[Hashable, int]] = [{} for _ in nodes]
        for old, edges in enumerate(nodes):
            self.children[new[old]] = {edge: new[child] for edge, child in edges.items()}
        self.root = new[0]
        self.word2leaf = {key: new[leaf] for key, leaf in leaves.items()}
        self.leaf2word = {leaf: key for key, leaf in self.word2leaf.items()}
        pairs = list(enumerate(self.word2leaf.values()))
        self.idx_to_leaf = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        is_inner = np.ones(len(nodes), dtype=bool)
        is_inner[self.idx_to_leaf[:, 1]] = False
        self.ordering = np.flatnonzero(is_inner)
        self._parents = np.full(len(nodes), -1, dtype=np.int64)
        for node, edges in enumerate(self.children):
            self._parents[list(edges.values())] = node
        self._levels = list(self._level_indices())

    def _level_indices(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return index arrays for adding up weights level by level, the deepest level first.

        Each level is (nodes sorted by parent, index of each parent's first node, parents).
        """
        depth = np.zeros(len(self.children), dtype=np.int64)
        for node in range(len(depth) - 2, -1, -1):  # parents have larger numbers
            depth[node] = depth[self._parents[node]] + 1
        levels = []
        for level in range(int(depth.max(initial=0)), 0, -1):
            nodes = np.flatnonzero(depth == level)
            nodes = nodes[np.argsort(self._parents[nodes], kind="stable")]
            parents, starts = np.unique(self._parents[nodes], return_index=True)
            levels.append((nodes, starts, parents))
        return levels

    @cached_property
    def jump(self) -> list[NDArray[np.int32]]:
        """For each node, the sorted numbers of its children."""
        return [np.array(sorted(edges.values()), dtype=np.int32) for edges in self.children]

    @cached_property
    def node2prefix(self) -> dict[int, list[Any]]:
        """Node → the labels on the path from the root to it, without a leaf's own label."""
        prefixes: dict[int, list[Any]] = {self.root: []}
        for node in range(self.root, -1, -1):
            for edge, child in self.children[node].items():
                prefixes[child] = prefixes[node] if _is_leaf(edge) else [*prefixes[node], edge]
        return prefixes

    def weight_sum(self, ws: Any) -> Any:
        """Sum the weights of all vocabulary entries below each node, such as the mass of a prefix.

        ws: weights of the entries, [V].

        Returns: float64 [n_nodes], indexed by node.
        """
        return self.batch_weight_sum([ws])[0]

    def weight_max(self, ws: Any) -> Any:
        """Return the largest weight of the vocabulary entries below each node.

        With `weight_sum`'s arguments, the largest probability of a token that starts with the
        prefix.

        ws: weights of the entries, [V].

        Returns: float64 [n_nodes], indexed by node.
        """
        return self.batch_weight_max([ws])[0]

    def batch_weight_sum(self, ws: Any) -> Any:
        """Compute `weight_sum` of each row: [B, V] → float64 [B, n_nodes]."""
        return self._combine_upward(ws, 0.0, np.add)

    def batch_weight_max(self, ws: Any) -> Any:
        """Compute `weight_max` of each row: [B, V] → float64 [B, n_nodes]."""
        return self._combine_upward(ws, -np.inf, np.maximum)

    def _combine_upward(self, ws: Any, empty: float, combine: np.ufunc) -> Weights:
        """Combine the weights [B, V] of leaves into weights of all nodes [B, n_nodes].

        empty: weight of a node without entries. combine: `np.add` or `np.maximum`.
        """
        rows = np.stack([self._check_length(np.asarray(to_host(row), np.float64)) for row in ws])
        out = np.full((len(rows), len(self.children)), empty, dtype=np.float64)
        out[:, self.idx_to_leaf[:, 1]] = rows
        for nodes, starts, parents in self._levels:
            out[:, parents] = combine.reduceat(out[:, nodes], starts, axis=1)
        return out

    def _preprocess_ws(self, ws: Any) -> Any:
        """Return weights, such as a torch tensor, as a NumPy array on the host."""
        return np.asarray(to_host(ws))

    def _check_length(self, row: Any) -> Any:
        """Return the row; raise ConfigError unless it has one weight per vocabulary entry."""
        if len(row) != len(self.decode):
            raise ConfigError(f"{len(row)} weights for {len(self.decode)} words; give one each")
        return row

    def visualize(self, ws: Any = None) -> str:
        """Return a drawing of the trie as Graphviz DOT source.

        ws: one weight per node to write on it, as `weight_sum` returns them; None: no weights.
        """
        if ws is not None and len(ws) != len(self.children):
            raise ConfigError(f"{len(ws)} weights for {len(self.children)} nodes; give one each")
        lines = ["digraph trie {"]
        for node, edges in enumerate(self.children):
            weight = "" if ws is None else f"\\n{float(ws[node]):.4f}"
            lines.append(f'  {node} [label="{node}{weight}"];')
            for edge, child in edges.items():
                shown = ascii(chr(edge))[1:-1] if isinstance(edge, int) else str(edge)
                shown = "end" if _is_leaf(edge) else shown
                quoted = shown.replace("\\", "\\\\").replace('"', '\\"')
                lines.append(f'  {node} -> {child} [label="{quoted}"];')
        return "\n".join([*lines, "}"])


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """A `TokenCharacterTrie` that computes in float32, on a GPU if torch has one.

    device: "cpu" or "cuda"; None: "cuda" if it is available.
    """

    def __init__(self, decode: Sequence[Any], device: str | None = None) -> None:
        if device not in ("cpu", "cuda", None):
            raise ConfigError(f"device is {device!r}; allowed are 'cpu', 'cuda' and None")
        if device == "cuda" and not HAS_TORCH:
            raise ConfigError("device='cuda' needs torch, which is not installed; use 'cpu'")
        super().__init__(decode)
        self.device = device or ("cuda" if _has_cuda() else "cpu")

    def batch_weight_sum(self, ws: Any) -> Any:
        """Compute `weight_sum` of each row on the device: [B, V] → NumPy float32 [B, n_nodes]."""
        if not HAS_TORCH:
            return super().batch_weight_sum(ws).astype(np.float32)
        return self._combine_on_device(self._preprocess_ws(ws), 0.0)

    def batch_weight_max(self, ws: Any) -> Any:
        """Compute `weight_max` of each row on the device: [B, V] → NumPy float32 [B, n_nodes]."""
        if not HAS_TORCH:
            return super().batch_weight_max(ws).astype(np.float32)
        return self._combine_on_device(self._preprocess_ws(ws), -np.inf)

    def _combine_on_device(self, rows: Any, empty: float) -> Any:
        """Combine the weights [B, V] of entries into weights of all nodes, with torch.

        rows: float32 tensor [B, V] on `device`, from `_preprocess_ws`. empty: the weight of a node
        without entries; 0 computes sums, -inf computes maxima.

        Returns: a NumPy array [B, n_nodes].
        """
        import torch

        shape = (len(self.children), len(rows))
        out = torch.full(shape, empty, device=self.device)
        leaves, levels = self._device_indices
        out[leaves] = rows.T
        for nodes, parents in levels:
            if empty == 0:
                out.index_add_(0, parents, out[nodes])
            else:
                above = parents[:, None].expand(-1, len(rows))
                out.scatter_reduce_(0, above, out[nodes], "amax")
        return out.T.contiguous().cpu().numpy()

    @cached_property
    def _device_indices(self) -> tuple[Any, list[tuple[Any, Any]]]:
        """Index tensors on the device: the leaves, and (nodes, parents) of each level."""
        import torch

        def to_device(numbers: Any) -> Any:
            return torch.from_numpy(numbers.astype(np.int64)).to(self.device)

        levels = [
            (to_device(nodes), to_device(self._parents[nodes])) for nodes, _, _ in self._levels
        ]
        return to_device(self.idx_to_leaf[:, 1]), levels

    def _preprocess_ws(self, ws: Any) -> Any:
        """Return rows of weights as one float32 tensor on the device; without torch, an array."""
        if not HAS_TORCH:
            return np.stack([np.asarray(row, np.float32) for row in ws])
        import torch

        rows = [torch.as_tensor(self._check_length(row)) for row in ws]
        return torch.stack([row.to(self.device, torch.float32) for row in rows])


class AsyncTokenCharacterTrie:
    """A trie for asyncio: concurrent requests run as one batch of `TokenCharacterTrie`.

    A batch has all requests of one iteration of the event loop. There is no background task.
    """

    def __init__(self, trie: TokenCharacterTrie) -> None:
        self.trie = trie
        self._task: Any = None  # read by genlm's clients; always None
        self._pending: dict[Any, list[tuple[str, Any, asyncio.Future[Any]]]] = {}

    @classmethod
    def from_vocab(
        cls, vocab: Sequence[Any], backend: str = "parallel", **kwargs: Any
    ) -> AsyncTokenCharacterTrie:
        """Build a trie over a vocabulary.

        Args:
            vocab: the entries, as for `TokenCharacterTrie`.
            backend: "parallel" for `ParallelTokenCharacterTrie`, "sequential" for
                `TokenCharacterTrie`.
            kwargs: keywords of that class.
        """
        kinds = {"parallel": ParallelTokenCharacterTrie, "sequential": TokenCharacterTrie}
        if backend not in kinds:
            raise ConfigError(f"Unknown backend: {backend!r}; allowed are {', '.join(kinds)}")
        return cls(kinds[backend](vocab, **kwargs))

    async def weight_sum(self, ws: Any) -> Any:
        """Like `TokenCharacterTrie.weight_sum`, computed in a batch with concurrent requests."""
        return await (await self._queue_request(ws, "sum"))

    async def weight_max(self, ws: Any) -> Any:
        """Like `TokenCharacterTrie.weight_max`, computed in a batch with concurrent requests."""
        return await (await self._queue_request(ws, "max"))

    async def _queue_request(self, request: Any, op: str) -> asyncio.Future[Any]:
        """Queue a request for the next batch, and return the future of its result.

        Args:
            request: weights of the entries, [V].
            op: "sum" or "max".
        """
        if op not in ("sum", "max"):
            raise ConfigError(f"Unknown operation: {op!r}; allowed are 'sum' and 'max'")
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiting = self._pending.setdefault(loop, [])
        waiting.append((op, request, future))
        if len(waiting) == 1:
            loop.call_soon(self._run_batch, loop)
        return future

    def _run_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the queued requests of an event loop: one batch of sums, one of maxima."""
        requests = [each for each in self._pending.pop(loop, []) if not each[2].done()]
        for kind in ("sum", "max"):
            chosen = [(ws, future) for name, ws, future in requests if name == kind]
            if chosen:
                self._run_kind(kind, chosen)

    def _run_kind(self, kind: str, requests: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        """Run (weights, future) requests as one batch; if it fails, run them one by one.

        kind: "sum" or "max".
        """
        call = self.trie.batch_weight_sum if kind == "sum" else self.trie.batch_weight_max
        try:
            rows = call([ws for ws, _ in requests])
        except Exception as error:
            if len(requests) == 1:
                requests[0][1].set_exception(error)
                return
            for request in requests:  # the error is one caller's own
                self._run_kind(kind, [request])
            return
        for (_, future), row in zip(requests, rows, strict=True):
            future.set_result(row)

    def start(self) -> None:
        """Do nothing; genlm's programs call this method."""

    async def cleanup(self) -> None:
        """Do nothing; genlm's programs call this method."""

    def shutdown(self) -> None:
        """Do nothing; genlm's programs call this method."""


def to_host(row: Any) -> Any:
    """Return a tensor as a NumPy array on the host; other values unchanged."""
    return row.detach().cpu().numpy() if hasattr(row, "detach") else row


def _get_or_add_child(nodes: list[dict[Hashable, int]], node: int, edge: Hashable) -> int:
    """Return the child of a node for an edge label; add it if there is none."""
    child = nodes[node].get(edge)
    if child is None:
        child = nodes[node][edge] = len(nodes)
        nodes.append({})
    return child


def _key_and_edges(entry: Any) -> tuple[Hashable, Any]:
    """Return a vocabulary entry's key in `word2leaf`, and the labels of the path to its leaf."""
    if isinstance(entry, Token):
        return (entry.byte_string, entry.token_id), entry.byte_string
    return entry, entry


def _is_leaf(edge: Hashable) -> bool:
    """Return True if the label is that of an edge to a leaf: (None, position of the entry)."""
    return isinstance(edge, tuple) and len(edge) == 2 and edge[0] is None


def _has_cuda() -> bool:
    """Return True if torch is installed and has a CUDA device."""
    if not HAS_TORCH:
        return False
    import torch

    return bool(torch.cuda.is_available())
