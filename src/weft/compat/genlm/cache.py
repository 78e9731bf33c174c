"""`OutputCache` and `TokenTrie`: small caches for programs that use a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ..._core.sampling.metrics import log_softmax
from ...asynclm.row_cache import CacheNode, walk
from ...lm.lm import LM


class OutputCache:
    """An LRU cache of model outputs, used like a dict.

    Reading a key that is not in the cache raises KeyError.
    """

    def __init__(self, maxsize: int, move_to_cpu: bool = False) -> None:
        """Create an empty cache.

        Args:
            maxsize: maximum number of outputs; the least recently used one is removed first.
            move_to_cpu: store tensors on the host, and move them back when they are read.
        """
        self.maxsize = maxsize
        self.move_to_cpu = move_to_cpu
        self.cache: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    def __getitem__(self, key: Any) -> Any:
        device, value = self.cache[key]
        self.cache.move_to_end(key)
        return value.to(device) if self.move_to_cpu and device is not None else value

    def __setitem__(self, key: Any, value: Any) -> None:
        device = getattr(value, "device", None)
        if self.move_to_cpu and hasattr(value, "cpu"):
            value = value.cpu()
        self.cache[key] = (device, value)
        self.cache.move_to_end(key)
        while len(self.cache) > self.maxsize:
            self.cache.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __len__(self) -> int:
        return len(self.cache)

    def clear(self) -> None:
        """Remove all outputs from the cache."""
        self.cache.clear()


class TokenTrie:
    """A trie of token contexts: a node stores the log-probabilities after its context.

    Nothing is evicted: nodes and their log-probabilities stay until the trie is deleted.
    `clear_kv_cache` drops only the KV.
    """

    def __init__(self, logprobs: Any = None) -> None:
        self.children: dict[int, TokenTrie] = {}
        self.logprobs = logprobs
        self.past_key_values: Any = None

    def has_token(self, token_id: int) -> bool:
        """Return True if this node has a child for the token."""
        return token_id in self.children

    def get_token(self, token_id: int) -> TokenTrie:
        """Return the child for a token. Raises: KeyError if there is none."""
        return self.children[token_id]

    def add_token(self, token_id: int, logprobs: Any = None) -> TokenTrie:
        """Return the child for a token; create it if there is none.

        logprobs: log-probabilities [V] to store on the child; None keeps those that it has.
        """
        child = self.children.setdefault(token_id, TokenTrie())
        if logprobs is not None:
            child.logprobs = logprobs
        return child

    def extend_cache(
        self, next_token_index: int, token_ids: Sequence[int], logits: Any, base: int
    ) -> TokenTrie:
        """Add the rest of a context below this node, and return the last node.

        Args:
            next_token_index: index of the context's first token that is not in the trie.
            token_ids: the full context.
            logits: raw logits [T, V]. Row i belongs to position base + i. Each new node stores the
                log-softmax of its row.
            base: position of the first row.
        """
        node = self
        for at in range(next_token_index, len(token_ids)):
            node = node.add_token(token_ids[at], _log_softmax(logits[at - base]))
        return node

    def clear_kv_cache(self) -> None:
        """Remove the KV of this node and of all nodes below it."""
        for node in self._nodes():
            node.past_key_values = None

    def _nodes(self) -> Iterator[TokenTrie]:
        """Yield this node and all nodes below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def __repr__(self) -> str:
        return f"<TokenTrie of {sum(1 for _ in self._nodes()) - 1} tokens>"


class CachedContext:
    """A read-only view of one context in an LM's token tree, with the interface of `TokenTrie`.

    Each attribute is looked up in the tree when it is read, because the LM may evict data.

    Args:
        lm: the LM.
        ids: token ids of the context; [] for the root.
        lora_name: the LoRA adapter of the context; None: the base model.
    """

    def __init__(self, lm: LM, ids: Sequence[int], lora_name: str | None = None) -> None:
        self._lm = lm
        self._ids = list(ids)
        self._lora_name = lora_name

    def has_token(self, token_id: int) -> bool:
        """Return True if the tree contains this context followed by this token."""
        at, n_matched, _, _ = self._look_up([*self._ids, token_id])
        return n_matched > len(self._ids)

    def get_token(self, token_id: int) -> CachedContext:
        """Return the context followed by a token. Raises: KeyError if the tree has none."""
        if not self.has_token(token_id):
            raise KeyError(token_id)
        return CachedContext(self._lm, [*self._ids, token_id], self._lora_name)

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the context."""
        return len(self._ids)

    @property
    def has_kv(self) -> bool:
        """True if the KV of the context's last token is in the engine's memory now.

        A copy on the host does not count.
        """
        return self._node.has_kv

    @property
    def past_key_values(self) -> CachedContext | None:
        """This object if the context has KV, else None; a value to pass back as `past`.

        The KV itself stays in the engine.
        """
        return self if self.has_kv else None

    @property
    def logits(self) -> Any:
        """A copy of the cached raw logits: float32 [V]; None if they are not cached."""
        return self._node.logits

    @property
    def logprobs(self) -> Any:
        """The log-probabilities of the cached logits: float32 [V]; None if not cached."""
        row = self.logits
        return None if row is None else _log_softmax(row)

    @property
    def _node(self) -> CacheNode:
        """The token tree's node at the end of the context."""
        return self._look_up(self._ids)[0]

    def _look_up(self, ids: Sequence[int]) -> tuple[CacheNode, int, CacheNode | None, int]:
        """Return what `walk` finds in the token tree for these token ids.

        (node, tokens matched, deepest node with KV or None, tokens with KV).
        """
        return walk(self._lm, self._lm.place(ids, namespace=self._lora_name))

    def __repr__(self) -> str:
        return f"<CachedContext of {self.n_tokens} tokens>"


def _log_softmax(row: Any) -> Any:
    """Return the log-softmax of a row of logits [V], a torch tensor or an array."""
    if type(row).__module__.startswith("torch"):
        return row.float().log_softmax(-1)
    return log_softmax(row)
