"""Lists of runs by kind, state and owner stay quick over ten thousand runs"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_runs_kind_state_created", "runs", ["kind", "state", "created_at"])
    op.create_index("ix_runs_state_created", "runs", ["state", "created_at"])
    op.create_index("ix_runs_owner_created", "runs", ["owner", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_runs_owner_created", "runs")
    op.drop_index("ix_runs_state_created", "runs")
    op.drop_index("ix_runs_kind_state_created", "runs")
