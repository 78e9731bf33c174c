"""Nodes keep the probability mass that a constraint left at each of their tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Add `legal_logmass`; NULL for nodes without a constraint, and for those saved before."""
    op.add_column("nodes", sa.Column("legal_logmass", sa.LargeBinary, nullable=True))
