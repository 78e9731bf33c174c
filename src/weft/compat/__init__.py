"""The names of other systems: scripts for these run after changing their import line."""
