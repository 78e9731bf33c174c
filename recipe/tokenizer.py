"""The tokenizer: byte-level BPE, every digit a token, control tokens for chat."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus import sample

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ["<|user|>", "<|assistant|>", "<|system|>"]
SPECIAL = [PAD, BOS, *ROLES, END]  # ids 0, 1, 2, …
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if not loop.last or m['role'] != 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SEED = 7


def train_tokenizer(n_vocab: int, n_texts: int = 60_000) -> Any:
    """Return a Transformers tokenizer trained on `n_texts` texts of the corpus."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(n_texts), trainer)
    tokenizer.post_processor = _bos_first()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=ROLES,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _texts(n: int) -> Iterator[str]:
    rng = Random(SEED)
    for _ in range(n):
        example = sample(rng)
        yield " ".join(text for text in (example.user, example.assistant) if text)


def _bos_first() -> processors.Sequence:
    bos_id = SPECIAL.index(BOS)
    template = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
