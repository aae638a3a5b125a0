"""Which checks a speculator failed, and who allowed it to be deployed all the same"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("failed", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("allowed_by", sa.String(length=255), nullable=True),
        sa.Column("allowed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("allowed_despite", sa.JSON(), nullable=True),
    ):
        op.add_column("speculators", column)


def downgrade() -> None:
    for name in ("allowed_despite", "allowed_at", "allowed_by", "failed"):
        op.drop_column("speculators", name)
