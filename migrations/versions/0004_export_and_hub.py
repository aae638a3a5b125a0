"""Runs that export a speculator, or pull from and push to the hub"""

from __future__ import annotations

from migrations.run_kinds import allow, forget_runs

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_BEFORE = ("verifier", "self_write", "prepare", "train", "evaluate", "convert", "deploy")
_AFTER = (*_BEFORE[:-1], "export", "pull", "push", "deploy")


def upgrade() -> None:
    allow(_BEFORE, _AFTER)


def downgrade() -> None:
    forget_runs(set(_AFTER) - set(_BEFORE))
    allow(_AFTER, _BEFORE)
