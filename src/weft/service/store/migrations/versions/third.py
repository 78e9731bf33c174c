"""An operation that grew nodes says which model grew them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Add the model of an operation; of those of before nobody knows it."""
    op.add_column("operations", sa.Column("model", sa.Text, nullable=True))
