"""Models that run in Weft, for the `llm` command and library.

Nothing of Weft is imported before a model is used.
"""

from __future__ import annotations

from typing import Any

import click
import llm

from .choices import EMBEDDED, Choice, drop, keep, kept
from .model import AsyncWeft, Weft
from .talk import Speaker


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register the embedded model and those that were added."""
    for choice in (EMBEDDED, *kept()):
        speaker = Speaker(choice)
        register(Weft(choice, speaker), AsyncWeft(choice, speaker))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Add `llm weft`."""

    @cli.group(name="weft")
    def weft() -> None:
        """Models that run in Weft, in this process."""

    @weft.command(name="add")
    @click.argument("model")
    @click.option("--name", help="What to call it; weft/NAME is its id.")
    @click.option("--engine", default="auto", help="numpy, torch, llamacpp, mlx, vllm …")
    @click.option("--kv-budget", default="auto", help="Memory for KV, such as 2GB.")
    def add(model: str, name: str | None, engine: str, kv_budget: str) -> None:
        """Add MODEL: a folder, a .gguf file, a Hub id or a server's address."""
        choice = keep(Choice.create(model, name, engine, kv_budget))
        click.echo(f"added {choice.model_id}: llm -m {choice.model_id} 'Hello'")

    @weft.command(name="remove")
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget a model that was added; its files stay."""
        click.echo(f"removed {drop(name).model_id}")

    @weft.command(name="list")
    def list_() -> None:
        """List the models."""
        for choice in (EMBEDDED, *kept()):
            click.echo(f"{choice.model_id}  {choice.model}  {choice.engine}")
