"""Changing which kinds of runs the store allows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from alembic import op


def forget_runs(kinds: Collection[str]) -> None:
    """Delete the runs of kinds that an older Speclab does not know."""
    new = ", ".join(f"'{kind}'" for kind in kinds)
    ours = f"(SELECT id FROM runs WHERE kind IN ({new}))"
    op.execute(f"UPDATE gpu_leases SET run_id = NULL, taken_at = NULL WHERE run_id IN {ours}")
    for table in ("speculators", "verifiers", "data_sets"):
        op.execute(f"UPDATE {table} SET run_id = NULL WHERE run_id IN {ours}")
    op.execute(f"DELETE FROM run_dependencies WHERE run_id IN {ours} OR needs_id IN {ours}")
    op.execute(f"DELETE FROM runs WHERE id IN {ours}")


def allow(before: Sequence[str], after: Sequence[str]) -> None:
    """Change the kinds that `ck_runs_kind` allows.

    SQLite can't alter a constraint. Copying the table would delete what refers to it, so the text
    of the constraint is changed where SQLite keeps it, the way its manual gives for constraints
    that stored rows fulfil (lang_altertable, section 7).
    """
    if op.get_bind().dialect.name != "sqlite":
        op.drop_constraint(op.f("ck_runs_kind"), "runs", type_="check")
        op.create_check_constraint(op.f("ck_runs_kind"), "runs", _condition(after))
        return
    connection = op.get_bind()
    version = connection.execute(sa.text("PRAGMA schema_version")).scalar_one()
    connection.execute(sa.text("PRAGMA writable_schema=ON"))
    changed = connection.execute(
        sa.text(
            "UPDATE sqlite_master SET sql = replace(sql, :before, :after)"
            " WHERE type = 'table' AND name = 'runs' AND instr(sql, :before)"
        ),
        {"before": _condition(before), "after": _condition(after)},
    )
    if changed.rowcount != 1:
        raise RuntimeError("the table runs has another constraint on its kinds than expected")
    connection.execute(sa.text(f"PRAGMA schema_version={version + 1}"))
    connection.execute(sa.text("PRAGMA writable_schema=OFF"))


def _condition(kinds: Sequence[str]) -> str:
    return "kind IN ({})".format(", ".join(f"'{kind}'" for kind in kinds))
