"""Weft under the names of N8Loom and genlm-backend; their programs only change an import line."""
