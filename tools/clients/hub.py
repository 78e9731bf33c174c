"""A folder like the Hub's cache, with small models under the names that the suites ask for.

Tokenizers are trained here, on the text of Python's standard library; weights are random. What a
suite asks of the real models' texts it cannot find, on either side.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

N_BYTE_LEVEL = 50_256  # as many as GPT-2's: suites name ids up to its end token's, 50256
N_SENTENCE_PIECE = 3000

GPT2 = ("openai-community/gpt2", "gpt2", "gpt2-medium")
LLAMA = "HuggingFaceTB/SmolLM-135M"
ADAPTER, MERGED = "vxef/smol_lora_toy", "vxef/smol_merged_toy"
BYTE_LEVEL = (
    "meta-llama/Meta-Llama-3-8B",
    "microsoft/phi-2",
    "unsloth/DeepSeek-R1-Distill-Llama-8B",
)
SENTENCE_PIECE = (
    "EleutherAI/llemma_7b",
    "codellama/CodeLlama-7b-Instruct-hf",
    "codellama/CodeLlama-7b-hf",
    "google/gemma-2b",
    "google/gemma-3-1b-pt",
    "google/gemma-7b",
    "mistralai/Mistral-7B-Instruct-v0.3",
)
WORD_PIECE = "bert-base-uncased"
HARMONY = "unsloth/gpt-oss-20b-BF16"
CHANNELS = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "return", "call")]


def make_hub(home: Path) -> None:
    """Fill `home` (HF_HOME of the suites) with all of them."""
    from transformers import BertConfig, GPT2Config, LlamaConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub = Hub(home / "hub")
    level = byte_level(["<|endoftext|>"])
    for name in GPT2:
        hub.add(name, level, gpt2(level))
    for name in BYTE_LEVEL:
        hub.add(name, level, GPT2Config())
    hub.add(HARMONY, byte_level(["<|endoftext|>", *CHANNELS]), GPT2Config())
    base = llama(level)
    hub.add(LLAMA, level, base)
    add_adapter(hub, level, base)
    pieces = sentence_piece()
    for name in SENTENCE_PIECE:
        hub.add(name, pieces, LlamaConfig())
    hub.add(WORD_PIECE, word_piece(), BertConfig())


class Hub:
    """The cache: a folder a repository, a snapshot folder in it, and the branch that names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, *parts: Any) -> None:
        """Write a repository from what has `save_pretrained`: tokenizer, model, configuration."""
        commit = hashlib.sha1(name.encode()).hexdigest()
        repo = self.folder / f"models--{name.replace('/', '--')}"
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        for part in parts:
            part.save_pretrained(snapshot)


def byte_level(special: list[str]) -> Any:
    """Return a tokenizer of GPT-2's kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Tokenizer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_BYTE_LEVEL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    end = special[0]
    tokenizer = GPT2Tokenizer(
        tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end, pad_token=end
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    return tokenizer


def sentence_piece() -> Any:
    """Return a tokenizer of Llama 2's kind: a dummy space, bytes for what is no piece."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.normalizer = spaces
    trainer = trainers.BpeTrainer(
        vocab_size=N_SENTENCE_PIECE, special_tokens=[*special, *fallback], show_progress=False
    )
    learner.train_from_iterator((word for text in corpus() for word in text.split()), trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Tokenizer(
        models.BPE(learned["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    begin = ("<s>", learned["vocab"]["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[begin]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_piece() -> Any:
    """Return a tokenizer of BERT's kind."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [chr(code) for code in range(33, 127)]
    words += [f"##{chr(code)}" for code in range(97, 123)]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


def gpt2(tokenizer: Any) -> Any:
    """Return a random GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    end = tokenizer.eos_token_id
    return seeded(
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_embd=64,
                n_layer=2,
                n_head=4,
                bos_token_id=end,
                eos_token_id=end,
                initializer_range=0.1,
            )
        )
    )


def llama(tokenizer: Any) -> Any:
    """Return a random Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    end = tokenizer.eos_token_id
    return seeded(
        lambda: LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=1024,
                bos_token_id=end,
                eos_token_id=end,
                initializer_range=0.1,
            )
        )
    )


def add_adapter(hub: Hub, tokenizer: Any, model: Any) -> None:
    """Add a LoRA adapter of `model`, and the model with it merged in."""
    import copy

    import torch
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    hub.add(ADAPTER, tuned)
    hub.add(MERGED, tokenizer, tuned.merge_and_unload())


def seeded(make: Any) -> Any:
    """Return a model that is the same in every run."""
    import torch

    torch.manual_seed(1)
    return make().eval()


def corpus() -> Iterator[str]:
    """Yield English and code: some of Python's standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        yield file.read_text(encoding="utf-8", errors="replace")
    yield " the city in a city, Token Tokens organization realization" * 50
