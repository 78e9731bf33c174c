"""The published test suites of genlm's packages, run over genlm-backend and over Weft."""
