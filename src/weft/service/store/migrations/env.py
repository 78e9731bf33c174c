"""Run the migrations on the connection and in the transaction of `Database`."""

from __future__ import annotations

from alembic import context

_attributes = context.config.attributes
context.configure(
    connection=_attributes["connection"],
    version_table=_attributes["version_table"],
    transactional_ddl=False,  # `Database` starts and ends the transaction
)
context.run_migrations()
