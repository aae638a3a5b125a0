"""Runs that let the verifier answer given chats anew"""

from __future__ import annotations

from migrations.run_kinds import allow, forget_runs

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_AFTER = (
    "verifier",
    "self_write",
    "regenerate",
    "prepare",
    "train",
    "evaluate",
    "convert",
    "export",
    "pull",
    "push",
    "deploy",
)
_BEFORE = tuple(kind for kind in _AFTER if kind != "regenerate")


def upgrade() -> None:
    allow(_BEFORE, _AFTER)


def downgrade() -> None:
    forget_runs({"regenerate"})
    allow(_AFTER, _BEFORE)
