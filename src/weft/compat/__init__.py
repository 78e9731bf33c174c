"""The lower-level names of systems that people come from; scripts change their import line."""
