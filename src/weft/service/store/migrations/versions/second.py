"""Operations that are parts of one act are undone together."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Add the act that an operation is a part of; those of before stand alone."""
    op.add_column("operations", sa.Column("act", sa.Text, nullable=True))
