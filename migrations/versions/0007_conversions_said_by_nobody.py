"""Conversions whose convention and K were defaults: as options they are a person's word now"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_RUNS = sa.table(
    "runs", sa.column("id", sa.String), sa.column("kind", sa.String), sa.column("params", sa.JSON)
)
_DEFAULT_K = 3


def upgrade() -> None:
    connection = op.get_bind()
    conversions = sa.select(_RUNS.c.id, _RUNS.c.params).where(_RUNS.c.kind == "convert")
    for run_id, params in connection.execute(conversions).all():
        said = dict(params)
        if said.get("aux_layers") is None:
            said.pop("aux_convention", None)
        if said.get("speculative_tokens") == _DEFAULT_K:
            del said["speculative_tokens"]
        change = sa.update(_RUNS).where(_RUNS.c.id == run_id).values(params=said)
        connection.execute(change)


def downgrade() -> None:
    """An older Speclab fills in the defaults."""
