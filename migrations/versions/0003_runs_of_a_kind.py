"""The list of runs of one kind, whatever their state, is read in order from an index"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_runs_kind_created", "runs", ["kind", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_runs_kind_created", "runs")
