"""Alembic's entry: migrates on the connection that `migrations.upgrade` made."""

from __future__ import annotations

from alembic import context

from app.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transactional_ddl=True,
    compare_type=True,
)
context.run_migrations()
