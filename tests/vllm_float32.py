"""The vLLM engine as the laws run it: small, in float32."""

from __future__ import annotations

from typing import Any

from weft.engines.vllm import VllmEngine


class Float32Vllm(VllmEngine):
    """Computes in float32 and takes adapters."""

    @classmethod
    def load(cls, folder: Any, **options: Any) -> VllmEngine:
        """Start vLLM small."""
        small = {
            "dtype": "float32",
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 256 << 20,
        }
        return super().load(folder, **{**small, **options})
