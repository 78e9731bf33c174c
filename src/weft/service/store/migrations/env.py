"""Runs the changes over the connection that `Database` hands in, inside its transaction."""

from __future__ import annotations

from alembic import context

_given = context.config.attributes
context.configure(
    connection=_given["connection"],
    version_table=_given["version_table"],
    transactional_ddl=False,  # `Database` begins and ends it
)
context.run_migrations()
