"""Shared by the programs for a card: trees by their shape, the model, rates, and records."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_check import LOST, read_lines
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from weft.engines.base import Fragment, Row, Span
from weft.engines.torch.paged.capture import GraphRecorder
from weft.engines.torch.paged.pool import PagedFragment, as_paged
from weft.engines.torch.paged.step import PagedBackend


class Shape(NamedTuple):
    """A tree by levels: how many nodes each has, and how many tokens each of them."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def n_leaves(self) -> int:
        return self.counts[-1]

    @property
    def n_slots(self) -> int:
        return sum(n * length for n, length in zip(self.counts, self.lengths, strict=True))

    @property
    def depth(self) -> int:
        return sum(self.lengths)


class Goal(NamedTuple):
    """Milliseconds a step on an H200: what it must take at most, and what is hoped for."""

    must: float
    goal: float


GOALS = {
    "1;128": Goal(4.9, 4.4),
    "1,10;4000,400": Goal(5.4, 4.8),
    "1,32;4096,256": Goal(5.8, 5.0),
    "1,64;16384,256": Goal(7.2, 6.0),
    "1,4,16,512;1024,256,128,32": Goal(16.5, 14.0),
    "256;1024": Goal(15.5, 14.5),
}
_CAPTURED = 8  # calls
_DRY = ["1;12", "1,3;20,6", "1,2,4;12,6,5", "3;16"]


def trees(*, dry: bool) -> dict[str, Shape]:
    """Return the trees by their names, "counts;lengths"."""
    return {name: shape_of(name) for name in (_DRY if dry else GOALS)}


def shape_of(name: str) -> Shape:
    counts, lengths = (tuple(map(int, part.split(","))) for part in name.split(";"))
    return Shape(counts, lengths)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def is_lost() -> bool:
    """Return True if the card no longer answers this process."""
    try:
        synchronise()
    except RuntimeError:
        return True
    return False


def timed(job: Callable[[], object], min_s: float = 0.2) -> float:
    """Return seconds a call takes on the device; on a CPU those of one call."""
    job()
    synchronise()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        job()
        return time.perf_counter() - began
    n, took = 5, 0.0
    while True:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(n):
            job()
        last.record()
        last.synchronize()
        took = first.elapsed_time(last) / 1e3
        if took >= min_s:
            return took / n
        n *= 4


def timed_alone(job: Callable[[], object], min_s: float = 0.2) -> tuple[float, bool]:
    """Return seconds a call takes on the device, its launches left out, and whether they were.

    Kernels of a few microseconds take less than launching them does: calls are captured, and
    played. A job that cannot be captured is timed as `timed` does.
    """
    job()
    synchronise()
    if not torch.cuda.is_available():
        return timed(job, min_s), False

    def some() -> torch.Tensor:
        for _ in range(_CAPTURED):
            job()
        return torch.zeros(1, device=device())

    try:
        captured = GraphRecorder(torch.device("cuda", torch.cuda.current_device()))(some)
    except RuntimeError:
        return timed(job, min_s), False
    return timed(captured.replay, min_s) / _CAPTURED, True


def copy_rate(*, dry: bool) -> float:
    """Return bytes a second that a copy on the device moves, read and written ones counted."""
    source = torch.zeros(1 << (20 if dry else 31), dtype=torch.uint8, device=device())
    target = torch.zeros_like(source)
    return 2 * len(source) / timed(lambda: target.copy_(source))


def product_rate(dtype: torch.dtype, *, dry: bool) -> float:
    """Return floating-point operations a second of a large square product of random numbers."""
    n = 256 if dry else 8192
    a, b = (torch.randn(n, n, device=device()).to(dtype) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b)


def llama(*, dry: bool) -> LlamaForCausalLM:
    """A random model of the shape of Llama 3 8B in bfloat16, created on the device; dry: a toy."""
    small = dict(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
    )  # fmt: skip
    large = dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=32768,
    )  # fmt: skip
    config = LlamaConfig(**(small if dry else large), bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dry else torch.bfloat16)
    try:
        with torch.device(device()):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


def read_bytes(model: LlamaForCausalLM) -> int:
    """Return the bytes of the weights that a step reads: all but the embedding's."""
    n = sum(weight.nbytes for weight in model.parameters())
    return n - model.get_input_embeddings().weight.nbytes


def words(n_vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose every token is a word of its own."""
    backend = Tokenizer(models.BPE({f"t{i}": i for i in range(n_vocab)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def prompt(n: int, n_vocab: int, number: int = 0) -> list[int]:
    """Some token ids; no two numbers give the same first one."""
    return [(i * i * 7 + 13 * i + 5 + 1009 * number) % n_vocab for i in range(n)]


def tree_rows(
    shape: Shape, memory: PagedBackend, *, flat: bool = False
) -> tuple[list[Row], list[Fragment]]:
    """Hang a tree of that shape in a memory, its KV as it lies there.

    flat: every row reads a list of its own of all the slots of its path, so nothing is shared.
    Returns a row a leaf that grows, and what is to be freed afterwards.
    """
    level: list[tuple[Span, ...]] = [()]
    fragments: list[Fragment] = []

    def hold(n: int) -> Fragment:
        fragments.append(kv := memory.new(None))
        memory.reserve(kv, n)
        memory.grew(kv, n)
        return kv

    for count, length in zip(shape.counts[:-1], shape.lengths[:-1], strict=True):
        n_each = count // len(level)
        level = [(*above, Span(hold(length), length)) for above in level for _ in range(n_each)]
    rows = []
    for above in level:
        for _ in range(shape.n_leaves // len(level)):
            path = _flat(above) if flat else above
            rows.append(Row(path, [5], shape.depth, hold(shape.lengths[-1]), (0,)))
    return rows, fragments


def _flat(above: tuple[Span, ...]) -> tuple[Span, ...]:
    if not above:
        return above
    alias = PagedFragment()  # never freed: its slots are those of others
    alias.slots = np.concatenate([as_paged(kv).slots[:n] for kv, n in above])
    alias.length = len(alias.slots)
    return (Span(alias, alias.length),)


class Record:
    """A file of JSON lines, one a figure; what fails is a line, too. Several may write to one."""

    def __init__(self, path: str, **of: Any) -> None:
        """path: its file; its recorded attempts are not repeated. of: values in the lines of
        this record, if others write to the file, too.
        """
        self._path = Path(path)
        lines = [line for line in read_lines(path)[0] if of.items() <= line.items()]
        self._n_attempts = 0
        self._n_before = sum("attempt" in line for line in lines)
        self._n_begun = sum("begins" in line for line in lines)

    def add(self, what: str, **values: Any) -> None:
        print(self._note({"what": what, **values}), flush=True)

    def _note(self, values: dict[str, Any]) -> str:
        line = json.dumps(values, default=str)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return line

    def attempt(
        self, what: str, job: Callable[[], dict[str, Any]], **named: Any
    ) -> dict[str, Any] | None:
        """Note what a job gives, or why it failed; None then, and where it is noted already.

        Ends the process with LOST where the card answers it no more. A job that a process ended in,
        as by a signal, has failed.
        """
        self._n_attempts += 1
        if self._n_attempts <= self._n_before:
            return None
        if self._n_attempts <= self._n_begun:
            self.add(what, **named, attempt=self._n_attempts, error="a process ended in it")
            return None
        self._note({"what": what, **named, "begins": self._n_attempts})
        named["attempt"] = self._n_attempts
        began = time.perf_counter()
        try:
            result = job()
            synchronise()
        except Exception as error:
            trace = "".join(traceback.format_exception(error))[-2000:]
            self.add(what, **named, error=f"{type(error).__name__}: {error}"[:500], trace=trace)
            result = None
            if is_lost():
                os._exit(LOST)  # an orderly end would ask the card
        else:
            self.add(what, **named, **result, took_s=round(time.perf_counter() - began, 2))
        gc.collect()
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # what an allocator says of a capture that failed
                torch.cuda.empty_cache()
        return result
