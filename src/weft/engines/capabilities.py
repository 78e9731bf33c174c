"""Features of engines, and the table of Weft's own engines for pages, `weft doctor` and tests."""

from __future__ import annotations

from dataclasses import dataclass

_FREE = "free"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine with the model that it has loaded."""

    steps: bool = True
    """Runs rows that the host schedules and returns logits of the full vocabulary. Branch, AsyncLM,
    `next` and Weft's constraints need it. Without it, only native runs are possible."""
    raw_logits: bool = True
    """The logits are those of the model. Otherwise they are log-probabilities, and a repetition
    penalty is rejected in steps, because it depends on the sign of a logit."""
    native_runs: bool = False
    """Generates runs by itself (`Engine.native`)."""
    scoring: bool | str = True
    """Scores given tokens (`measure`); implied by steps. Without steps, `forward` accepts rows with
    scores and no logits, and may omit entropies and ranks. A loaded model has True or False; a text
    states the condition in the table."""
    continues: bool | str = True
    """Continues an answer that was cut. A text states the condition in the table."""
    entropy: bool = True
    """Returns the entropy of every token, in steps and in native runs."""
    shared_attention: bool = False
    """Attends to a shared prefix once per step, not once per branch."""
    fork: str = ""
    """Cost of a fork at any position, as text."""
    grammar: str = "Weft"
    """Enforcer of constraints, as text."""
    lora: bool = False
    """Supports LoRA adapters (`Engine.add_adapter`)."""
    embed: bool = False
    """Returns hidden states (`Engine.hidden_states`)."""
    offload: bool = False
    """Offloads KV to the host (`Fragments.export` and `load`)."""
    save_kv: bool = False
    """Saves KV to files (`Fragments.export` and `load`)."""
    quantised: str = ""
    """Quantised weights that it runs, as text; "" for none."""
    devices: str = "CPU"
    """Devices that it runs on, as text."""
    families: str = ""
    """Model families that it runs, as text."""
    several_gpus: str = ""
    """Support of several GPUs or nodes, as text; "" for none."""
    takes: str = ""
    """Models to use it for, as text."""
    packages: tuple[str, ...] = ()
    """Packages that must be installed, by their import names."""


# Weft's own engines, with the models that they support best.
OWN: dict[str, Capabilities] = {
    "numpy": Capabilities(
        shared_attention=True,
        fork=_FREE,
        embed=True,
        offload=True,
        save_kv=True,
        quantised="GGUF, dequantised",
        families="Llama, Mistral, Qwen2, Qwen3",
        takes="the embedded model, folders and GGUF files of the Llama family",
        packages=("numpy",),
    ),
    "torch": Capabilities(
        shared_attention=True,
        fork=_FREE,
        lora=True,
        embed=True,
        offload=True,
        save_kv=True,
        quantised="torchao, bitsandbytes; GGUF, dequantised",
        devices="CPU, CUDA",
        families="decoders of Transformers; ALiBi, recurrent, hybrid: no prefix caching",
        takes="most models of the Hub",
        packages=("torch", "transformers"),
    ),
    "mlx": Capabilities(
        shared_attention=True,
        fork=_FREE,
        lora=True,
        embed=True,
        offload=True,
        save_kv=True,
        quantised="mlx-lm's",
        devices="Apple GPU, CPU",
        families="mlx-lm's; recurrent, hybrid: no prefix caching",
        takes="models of mlx-lm",
        packages=("mlx", "mlx_lm"),
    ),
    "llamacpp": Capabilities(
        fork=_FREE,
        embed=True,
        offload=True,
        save_kv=True,
        quantised="all GGUF types",
        devices="CPU, CUDA, Metal, Vulkan, ROCm",
        families="llama.cpp's with attention in every layer",
        several_gpus="of one machine",
        takes="GGUF files",
        packages=("llama_cpp",),
    ),
    "vllm": Capabilities(
        native_runs=True,
        entropy=False,
        shared_attention=False,
        fork="tokens that are not in its prefix cache",
        grammar="vLLM, Weft",
        lora=True,
        quantised="vLLM's: AWQ, GPTQ, FP8, …",
        devices="CUDA, ROCm, XPU, CPU",
        families="all of vLLM",
        several_gpus="tensor, pipeline, data parallel",
        takes="most models of the Hub, on several GPUs and machines",
        packages=("vllm",),
    ),
    "remote": Capabilities(
        steps=False,
        raw_logits=False,
        native_runs=True,
        scoring="where the server can",
        continues="where the server can",
        entropy=False,
        fork="tokens that are not in the server's cache",
        grammar="the server, where it can",
        quantised="the server's",
        devices="the server's",
        families="the server's",
        several_gpus="the server's",
        takes="addresses of OpenAI-compatible servers",
        packages=("httpx2",),
    ),
}

# Engines without optional dependencies.
BASE = frozenset({"numpy", "remote"})

# Lines of the table: title, field of `Capabilities`.
ROWS: tuple[tuple[str, str], ...] = (
    ("single steps, full-vocabulary logprobs", "steps"),
    ("raw logits", "raw_logits"),
    ("log-probabilities of given text", "scoring"),
    ("continues from the middle of an answer", "continues"),
    ("generates full sequences itself", "native_runs"),
    ("entropy of every token", "entropy"),
    ("shared prefix attended once", "shared_attention"),
    ("cost of a fork", "fork"),
    ("constraints enforced by", "grammar"),
    ("LoRA adapters", "lora"),
    ("embeddings", "embed"),
    ("KV offloaded to the host", "offload"),
    ("KV saved to files", "save_kv"),
    ("quantised weights", "quantised"),
    ("devices", "devices"),
    ("model families", "families"),
    ("several GPUs, machines", "several_gpus"),
)


def cells(field: str, engines: dict[str, Capabilities]) -> list[str]:
    """Return one line of the table, one cell per engine: "yes", "" for no, or the text of the
    field.
    """
    values = [getattr(capabilities, field) for capabilities in engines.values()]
    return ["yes" if value is True else value or "" for value in values]
