"""The tables that looms are kept in. What makes and changes them stands in `migrations/`.

A row of `nodes` is never deleted while its loom is there: a node that was removed is marked, so its
number is never given again, and undo only takes the mark away. `rev` of a row is the loom's
revision that wrote it last: who knows a loom up to a revision reads what is above.
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
# SQLite counts by itself only what is called INTEGER.
Key = BigInteger().with_variant(Integer, "sqlite")


def _of_loom() -> Column[int]:
    return Column("loom", Key, ForeignKey("looms.key", ondelete="CASCADE"), nullable=False)


looms = Table(
    "looms",
    metadata,
    Column("key", Key, primary_key=True),
    Column("id", String(32), nullable=False),
    Column("name", Text, nullable=False),
    # Which removal took it away: what was removed together comes back together.
    Column("removed", Integer),
    Column("turn", BigInteger, nullable=False),  # rises with each change of any loom
    Column("changed", Float, nullable=False),  # seconds since 1970, for people
    Column("rev", Integer, nullable=False),
    Column("next_number", Integer, nullable=False),
    Column("n_nodes", Integer, nullable=False),
    # For lists: what to load to grow it, and what was asked.
    Column("model", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("head", Text, nullable=False),  # JSON, as the head of a file
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

# Sampling parameters, each once: key is the hash of the JSON.
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
    Column("parent", Integer),  # a number; the root has none
    Column("place", Float, nullable=False),  # orders siblings
    # No index has `removed` or `rev`: PostgreSQL then marks thousands in place. They stand before
    # what is long: SQLite reads a row from its beginning.
    Column("removed", Boolean, nullable=False),
    Column("rev", Integer, nullable=False),
    Column("writer", String(32)),  # who grows it just now
    Column("text", Text, nullable=False),
    # The text as UTF-8 where the database's own text cannot hold it: zero bytes, lone surrogates.
    Column("exact", LargeBinary),
    Column("words", Text, nullable=False),  # the text as it is searched
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
    Column("legal_logmass", LargeBinary),  # only of nodes with a constraint
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

# The tokens of nodes that grow, as they came; they go into the node's row when it is done.
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
    Column("act", Text),  # what several operations are parts of: they are undone together
    Column("model", Text),  # that grew what it added
    Index("ix_operations_loom", "loom", "key"),
)

# Processes that grow nodes. beat: when it was last seen alive, by the database's clock.
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

# What was drawn last in each terminal, and where its reader stands.
terminals = Table(
    "terminals",
    metadata,
    Column("mark", String(64), primary_key=True),
    _of_loom(),
    Column("number", Integer, nullable=False),
    Column("turn", BigInteger, nullable=False),
)
