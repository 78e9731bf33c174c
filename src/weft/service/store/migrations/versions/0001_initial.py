"""Create the tables of looms, nodes and their log, and the full-text index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

# Unreleased versions reached the same tables in four migrations; their databases stay valid.
revision = "4"
down_revision = None

_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")

# The index stores only words. Triggers update it in the transaction that changes the rows.
_SQLITE = (
    """
    CREATE VIRTUAL TABLE nodes_fts USING fts5(
      words, content='nodes', content_rowid='key',
      tokenize='unicode61 remove_diacritics 0', prefix='2 3')
    """,
    """
    CREATE TRIGGER nodes_fts_insert AFTER INSERT ON nodes BEGIN
      INSERT INTO nodes_fts (rowid, words) VALUES (new.key, new.words);
    END
    """,
    """
    CREATE TRIGGER nodes_fts_delete AFTER DELETE ON nodes BEGIN
      INSERT INTO nodes_fts (nodes_fts, rowid, words) VALUES ('delete', old.key, old.words);
    END
    """,
    """
    CREATE TRIGGER nodes_fts_update AFTER UPDATE OF words ON nodes WHEN old.words <> new.words BEGIN
      INSERT INTO nodes_fts (nodes_fts, rowid, words) VALUES ('delete', old.key, old.words);
      INSERT INTO nodes_fts (rowid, words) VALUES (new.key, new.words);
    END
    """,
)
# A stored column: an expression index would recompute the vector whenever a row changes.
_POSTGRESQL = (
    """
    ALTER TABLE nodes ADD COLUMN vector tsvector
      GENERATED ALWAYS AS (to_tsvector('simple'::regconfig, words)) STORED
    """,
    "CREATE INDEX nodes_fts ON nodes USING gin (vector)",
    # Leave space on each page, so that rows can be marked as removed in place.
    "ALTER TABLE nodes SET (fillfactor = 70)",
)


def upgrade() -> None:
    """Create all tables and the index."""
    for create in (
        _looms,
        _sampling,
        _nodes,
        _pieces,
        _operations,
        _writers,
        _leases,
        _terminals,
    ):
        create()
    bind = op.get_bind()
    for statement in _SQLITE if bind.dialect.name == "sqlite" else _POSTGRESQL:
        bind.exec_driver_sql(statement)


def _looms() -> None:
    op.create_table(
        "looms",
        sa.Column("key", _KEY, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("removed", sa.Integer(), nullable=True),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.Column("rev", sa.Integer(), nullable=False),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("n_nodes", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("head", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_looms"),
        sa.UniqueConstraint("id", name="uq_looms_id"),
    )
    op.create_index("ix_looms_turn", "looms", ["turn"], unique=False)
    op.create_index(
        "uq_looms_name",
        "looms",
        ["name"],
        unique=True,
        sqlite_where=sa.text("removed IS NULL"),
        postgresql_where=sa.text("removed IS NULL"),
    )


def _sampling() -> None:
    op.create_table(
        "sampling",
        sa.Column("key", sa.String(length=32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_sampling"),
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("key", _KEY, nullable=False),
        sa.Column("loom", _KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("place", sa.Float(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("rev", sa.Integer(), nullable=False),
        sa.Column("writer", sa.String(length=32), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("exact", sa.LargeBinary(), nullable=True),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("entropies", sa.LargeBinary(), nullable=False),
        sa.Column("params", sa.String(length=32), nullable=True),
        sa.Column("lineage", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=True),
        sa.Column("stop_string", sa.Text(), nullable=True),
        sa.Column("terminal", sa.Boolean(), nullable=False),
        sa.Column("score", sa.Text(), nullable=True),
        sa.Column("meta", sa.Text(), nullable=False),
        sa.Column("bookmark", sa.Text(), nullable=True),
        sa.Column("legal_logmass", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["loom"], ["looms.key"], name="fk_nodes_loom", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["params"], ["sampling.key"], name="fk_nodes_params"),
        sa.PrimaryKeyConstraint("key", name="pk_nodes"),
        sa.UniqueConstraint("loom", "id", name="uq_nodes_loom_id"),
        sa.UniqueConstraint("loom", "number", name="uq_nodes_loom_number"),
    )
    op.create_index("ix_nodes_loom_parent", "nodes", ["loom", "parent"], unique=False)
    op.create_index(
        "ix_nodes_writer",
        "nodes",
        ["writer"],
        unique=False,
        sqlite_where=sa.text("writer IS NOT NULL"),
        postgresql_where=sa.text("writer IS NOT NULL"),
    )


def _pieces() -> None:
    """Create the table of token chunks of nodes in progress; the commit removes them."""
    op.create_table(
        "pieces",
        sa.Column("loom", _KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("entropies", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["loom"], ["looms.key"], name="fk_pieces_loom", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("loom", "number", "first", name="pk_pieces"),
    )


def _operations() -> None:
    op.create_table(
        "operations",
        sa.Column("key", _KEY, nullable=False),
        sa.Column("loom", _KEY, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("rev", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("n_added", sa.Integer(), nullable=False),
        sa.Column("n_removed", sa.Integer(), nullable=False),
        sa.Column("n_changed", sa.Integer(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("act", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["loom"], ["looms.key"], name="fk_operations_loom", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key", name="pk_operations"),
    )
    op.create_index("ix_operations_loom", "operations", ["loom", "key"], unique=False)


def _writers() -> None:
    op.create_table(
        "writers",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("began", sa.Text(), nullable=False),
        sa.Column("beat", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_writers"),
    )


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("loom", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("term", sa.Integer(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("loom", name="pk_leases"),
    )


def _terminals() -> None:
    op.create_table(
        "terminals",
        sa.Column("mark", sa.String(length=64), nullable=False),
        sa.Column("loom", _KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["loom"], ["looms.key"], name="fk_terminals_loom", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("mark", name="pk_terminals"),
    )
