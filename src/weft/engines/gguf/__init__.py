"""GGUF files: their header, the model that it describes, its weights and its tokenizer."""

from .header import GGUF, TYPES, GGUFTensor, check_model, read_gguf

__all__ = ["GGUF", "TYPES", "GGUFTensor", "check_model", "read_gguf"]
