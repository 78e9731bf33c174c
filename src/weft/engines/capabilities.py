"""What engines can do, and one table of Weft's own, which pages, `weft doctor` and tests read."""

from __future__ import annotations

from dataclasses import dataclass

_FREE = "free"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, with the model that it has loaded.

    steps: it runs rows that the host chose, a token at a time, and gives full logits rows of them:
    what Branch, AsyncLM, `next` and constraints of Weft's own stand on. Without it only runs that
    the engine generates itself are served, and everything else is refused by name.
    raw_logits: those rows are the model's logits; else they are log-probabilities, of which a
    repetition penalty, which asks for signs, is another one: it is refused in steps.
    scoring: it scores given tokens (`measure`), without steps, too: `forward` takes rows
    that want scores and no logits, and may leave entropies and ranks out. Steps imply it. Words say
    in the table of engines where it is so; a loaded model's is True or False.
    native_runs: it generates whole runs by itself (`Engine.native`). entropy: every token has its
    entropy, in runs of both kinds.
    shared_attention: a shared prefix is attended once a step, not once a branch.
    continues: an answer that was cut is gone on with from where it ends.
    fork: what a fork anywhere costs. grammar: who enforces constraints.
    lora, embed: `add_adapter`, `hidden_states`. offload, save_kv: `export` and `load` of KV.
    quantised, devices, families, several_gpus: in words; empty: none.
    takes: what it is for. packages: what must be installed, by the names they are imported by.
    """

    steps: bool = True
    raw_logits: bool = True
    native_runs: bool = False
    scoring: bool | str = True
    continues: bool | str = True
    entropy: bool = True
    shared_attention: bool = False
    fork: str = ""
    grammar: str = "Weft"
    lora: bool = False
    embed: bool = False
    offload: bool = False
    save_kv: bool = False
    quantised: str = ""
    devices: str = "CPU"
    families: str = ""
    several_gpus: str = ""
    takes: str = ""
    packages: tuple[str, ...] = ()


# Weft's own engines, as they are with the models they run best.
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
        shared_attention=True,
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
        fork="its prefix cache",
        grammar="vLLM, Weft",
        lora=True,
        quantised="vLLM's: AWQ, GPTQ, FP8, …",
        devices="CUDA, ROCm, XPU, CPU",
        families="all of vLLM",
        several_gpus="tensor, pipeline, data parallel",
        takes="most models of the Hub, on several GPUs and nodes",
        packages=("vllm",),
    ),
    "remote": Capabilities(
        steps=False,
        raw_logits=False,
        native_runs=True,
        scoring="where the server can",
        continues="where the server can",
        entropy=False,
        fork="as the server caches",
        grammar="the server, where it can",
        quantised="the server's",
        devices="the server's",
        families="the server's",
        several_gpus="the server's",
        takes="addresses of OpenAI-compatible servers",
        packages=("httpx2",),
    ),
}

# Those that need nothing but Weft itself.
BASE = frozenset({"numpy", "remote"})

# The rows of the table: what each is called, and the field.
ROWS: tuple[tuple[str, str], ...] = (
    ("steps, full-vocabulary logprobs", "steps"),
    ("raw logits", "raw_logits"),
    ("log-probabilities of given text", "scoring"),
    ("goes on from the middle of an answer", "continues"),
    ("generates runs by itself", "native_runs"),
    ("entropy of every token", "entropy"),
    ("shared prefix attended once", "shared_attention"),
    ("fork anywhere", "fork"),
    ("constraints enforced by", "grammar"),
    ("LoRA adapters", "lora"),
    ("embeddings", "embed"),
    ("KV offloaded to the host", "offload"),
    ("KV saved to files", "save_kv"),
    ("quantised weights", "quantised"),
    ("devices", "devices"),
    ("model families", "families"),
    ("several GPUs, nodes", "several_gpus"),
)


def cells(field: str, engines: dict[str, Capabilities]) -> list[str]:
    """Return one row of the table: "yes", "" for no, or the words, an engine each."""
    found = [getattr(capabilities, field) for capabilities in engines.values()]
    return ["yes" if value is True else value or "" for value in found]
