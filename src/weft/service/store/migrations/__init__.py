"""Changes of the tables, one file a change, run from the package by Alembic when one opens."""
