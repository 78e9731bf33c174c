"""The tables of looms. `migrations/` creates and changes them.

A row of `nodes` is not deleted before its loom. Removed nodes are only marked, so that numbers are
never reused and undo is cheap. `rev` of a row is the loom's revision that wrote it last. A process
that has read a loom up to a revision reads only rows with a higher `rev`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite assigns keys automatically only to columns of type INTEGER.
Key = BigInteger().with_variant(Integer, "sqlite")


def _of_loom() -> Column[int]:
    """Return the foreign key to a loom, part of a table's primary key."""
    return Column("loom", Key, ForeignKey("looms.key", ondelete="CASCADE"), nullable=False)


looms = Table(
    "looms",
    metadata,
    Column("key", Key, primary_key=True),
    Column("id", String(32), nullable=False),
    Column("name", Text, nullable=False),
    # Number of the removal. Looms removed together are restored together.
    Column("removed", Integer),
    Column("turn", BigInteger, nullable=False),  # rises with each change of any loom
    Column("changed", Float, nullable=False),  # seconds since 1970, for display
    Column("rev", Integer, nullable=False),
    Column("next_number", Integer, nullable=False),
    Column("n_nodes", Integer, nullable=False),
    # For lists of looms: model and engine that grow the loom, and its prompt.
    Column("model", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("head", Text, nullable=False),  # JSON of `LoomMetadata`
    UniqueConstraint("id"),
    Index("ix_looms_turn", "turn"),
    Index(
        "uq_looms_name",
        "name",
        unique=True,
        sqlite_where=text("removed IS NULL"),
        postgresql_where=text("removed IS NULL"),
    ),
)

# Sampling parameters, without duplicates: `key` is a hash of the JSON.
sampling = Table(
    "sampling",
    metadata,
    Column("key", String(32), primary_key=True),
    Column("data", Text, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("key", Key, primary_key=True),
    _of_loom(),
    Column("number", Integer, nullable=False),
    Column("id", Text, nullable=False),
    Column("parent", Integer),  # a number; NULL for the root
    Column("place", Float, nullable=False),  # orders siblings
    # No index contains `removed` or `rev`, so PostgreSQL updates thousands of rows in place. They
    # precede long columns, since SQLite reads a row from its start.
    Column("removed", Boolean, nullable=False),
    Column("rev", Integer, nullable=False),
    Column("writer", String(32)),  # id of the process that generates the node; else NULL
    Column("text", Text, nullable=False),
    # UTF-8 of texts that the database cannot store as text: with zero bytes or lone surrogates.
    Column("exact", LargeBinary),
    Column("words", Text, nullable=False),  # the normalized text for search
    Column("n_tokens", Integer, nullable=False),
    Column("tokens", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("entropies", LargeBinary, nullable=False),
    Column("params", String(32), ForeignKey("sampling.key")),
    Column("lineage", Text, nullable=False),
    Column("finish_reason", String(16)),
    Column("stop_string", Text),
    Column("terminal", Boolean, nullable=False),
    Column("score", Text),
    Column("meta", Text, nullable=False),
    Column("bookmark", Text),
    Column("legal_logmass", LargeBinary),  # only for nodes generated under a constraint
    UniqueConstraint("loom", "number"),
    UniqueConstraint("loom", "id"),
    Index("ix_nodes_loom_parent", "loom", "parent"),
    Index(
        "ix_nodes_writer",
        "writer",
        sqlite_where=text("writer IS NOT NULL"),
        postgresql_where=text("writer IS NOT NULL"),
    ),
)

# Token chunks of nodes in progress. The commit moves them into the node's row.
pieces = Table(
    "pieces",
    metadata,
    Column(
        "loom", Key, ForeignKey("looms.key", ondelete="CASCADE"), nullable=False, primary_key=True
    ),
    Column("number", Integer, primary_key=True),
    Column("first", Integer, primary_key=True),  # index of its first token in the node
    Column("n_tokens", Integer, nullable=False),
    Column("text", Text, nullable=False),  # JSON
    Column("tokens", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("entropies", LargeBinary, nullable=False),
)

operations = Table(
    "operations",
    metadata,
    Column("key", Key, primary_key=True),
    _of_loom(),
    Column("kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("rev", Integer, nullable=False),
    Column("state", String(8), nullable=False),  # done, undone, dropped (no redo any more)
    Column("n_added", Integer, nullable=False),
    Column("n_removed", Integer, nullable=False),
    Column("n_changed", Integer, nullable=False),
    Column("data", Text, nullable=False),
    Column("act", Text),  # name of a group of operations that are undone together
    Column("model", Text),  # model that generated the added nodes
    Index("ix_operations_loom", "loom", "key"),
)

# Processes that generate nodes. beat: time of the last heartbeat, by the database's clock.
writers = Table(
    "writers",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("began", Text, nullable=False),
    Column("beat", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("loom", String(64), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("term", Integer, nullable=False),  # rises with each owner
    Column("expires", Float, nullable=False),
)

# The loom last used in each terminal, and its current node.
terminals = Table(
    "terminals",
    metadata,
    Column("mark", String(64), primary_key=True),
    _of_loom(),
    Column("number", Integer, nullable=False),
    Column("turn", BigInteger, nullable=False),
)
