"""Train the embedded model: a Llama of 6.8 million parameters, in minutes on one GPU.

python -m recipe.train --out model               the model of the package, about 10 minutes
python -m recipe.train --out trial --tiny-run    20 steps of a small one on a CPU, a few seconds
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from . import dataset
from .evaluate import FULL, evaluate
from .tokenizer import train_tokenizer

HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """The model and its training; it ends at `minutes` or `steps`, if given."""

    texts: int = 4_000_000
    tokenizer_texts: int = 60_000
    vocab: int = 2048
    hidden: int = 256
    layers: int = 8
    rows: int = 256
    length: int = 1024
    warmup: int = 100
    rate: float = 2e-3
    minutes: float = 6.0
    steps: int = 0
    processes: int = os.cpu_count() or 1


TINY_RUN = Settings(
    texts=2000,
    tokenizer_texts=2000,
    vocab=512,
    hidden=128,
    layers=2,
    rows=4,
    length=128,
    warmup=4,
    rate=5e-3,
    minutes=1.0,
    steps=20,
    processes=1,
)


@dataclass(frozen=True, slots=True)
class Trained:
    """The measurements of a run. losses: one a step, nats per token."""

    losses: list[float]
    tokens: int
    parameters: int


def train(folder: Path, settings: Settings) -> Trained:
    """Train from nothing and save model and tokenizer in Transformers format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(settings.vocab, settings.tokenizer_texts)
    tokenizer.save_pretrained(folder)
    ids = dataset.build(folder / "tokenizer.json", settings.texts, settings.processes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = LlamaForCausalLM(_architecture(settings, tokenizer)).to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    _log(f"{len(ids) / 1e6:.1f}M tokens, {parameters / 1e6:.2f}M parameters, {device}")
    tokens = torch.from_numpy(ids.astype(np.int32)).to(device)
    losses = _fit(model, tokens, settings, device)
    _save(model, tokenizer, folder)
    return Trained(losses, len(losses) * settings.rows * settings.length, parameters)


def rate_at(settings: Settings, step: int, done: float) -> float:
    """Return the learning rate: a short ramp, flat until 60 % is done, then down to 2 %."""
    ramp = min(1.0, (step + 1) / settings.warmup)
    return settings.rate * ramp * (1.0 if done < 0.6 else 0.02 + 0.98 * (1 - done) / 0.4)


def _architecture(settings: Settings, tokenizer: Any) -> LlamaConfig:
    n_heads = settings.hidden // HEAD_DIM
    return LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=n_heads,
        num_key_value_heads=max(1, n_heads // 2),
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _fit(model: Any, ids: Any, settings: Settings, device: str) -> list[float]:
    """Run the steps; returns their losses, read from the device at the end."""
    optimizer = _optimizer(model, settings, device)
    forward = torch.compile(model) if device == "cuda" else model
    losses: list[Any] = []
    start = time.monotonic()
    for batch in dataset.batches(ids, n_rows=settings.rows, length=settings.length, seed=0):
        step = len(losses)
        elapsed = (time.monotonic() - start) / (60 * settings.minutes)
        done = min(1.0, max(elapsed, step / settings.steps if settings.steps else 0.0))
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(settings, step, done)
        batch = batch.long()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 100 == 0:
            _log(f"step {step}  loss {loss.item():.4f}  {done:.0%}")
    return [float(loss) for loss in losses]


def _optimizer(model: Any, settings: Settings, device: str) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=device == "cuda")


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    # The model names its sampling: searches are shown on its own distribution.
    model.generation_config.do_sample, model.generation_config.temperature = True, 1.0
    model.save_pretrained(folder)


def _log(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, default=Path("model"), help="folder to write")
    parser.add_argument("--tiny-run", action="store_true", help="a trial of seconds, on a CPU")
    parser.add_argument("--no-evaluation", action="store_true", help="stop after saving")
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(getattr(TINY_RUN, field.name))
        )
    given = vars(parser.parse_args(arguments))
    settings = TINY_RUN if given["tiny_run"] else Settings()
    names = [field.name for field in fields(Settings) if given[field.name] is not None]
    settings = replace(settings, **{name: given[name] for name in names})
    trained = train(given["out"], settings)
    metrics: dict[str, Any] = {
        "steps": len(trained.losses),
        "tokens": trained.tokens,
        "params": trained.parameters,
        "loss": trained.losses[-1] if trained.losses else math.nan,
    }
    if not given["tiny_run"] and not given["no_evaluation"]:
        metrics = {**evaluate(given["out"], FULL), **metrics}
    text = json.dumps(metrics, indent=1)
    (given["out"] / "eval.json").write_text(text, encoding="utf-8")
    _log(text)


if __name__ == "__main__":
    main()
