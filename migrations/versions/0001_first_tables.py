"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "verifier",
                "self_write",
                "prepare",
                "train",
                "evaluate",
                "convert",
                "deploy",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "queued",
                "running",
                "cancelling",
                "succeeded",
                "failed",
                "cancelled",
                "lost",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.String(length=255), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("replaces_id", sa.String(length=255), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("woken_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("job_pgid", sa.Integer(), nullable=True),
        sa.Column("job_started", sa.Double(), nullable=True),
        sa.Column("progress", sa.Double(), nullable=True),
        sa.Column("progress_text", sa.Text(), nullable=False),
        sa.Column("eta_s", sa.Double(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(
            ["replaces_id"], ["runs.id"], name=op.f("fk_runs_replaces_id_runs")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_runs_idempotency_key")),
    )
    op.create_index(op.f("ix_runs_created_at"), "runs", ["created_at"], unique=False)
    op.create_index(op.f("ix_runs_fingerprint"), "runs", ["fingerprint"], unique=False)
    op.create_index(
        "ix_runs_state_priority", "runs", ["state", "priority", "created_at"], unique=False
    )
    op.create_table(
        "acceptance_samples",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("deployment_id", sa.String(length=255), nullable=False),
        sa.Column("request_id", sa.String(length=255), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("drafted", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Integer(), nullable=False),
        sa.Column("per_position", sa.JSON(), nullable=False),
        sa.Column("accepted_per_step", sa.LargeBinary(), nullable=False),
        sa.Column("context_len", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["deployment_id"],
            ["runs.id"],
            name=op.f("fk_acceptance_samples_deployment_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_acceptance_samples")),
    )
    op.create_index(
        "ix_acceptance_samples_deployment_at",
        "acceptance_samples",
        ["deployment_id", "at"],
        unique=False,
    )
    op.create_table(
        "data_sets",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=255), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_data_sets_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_data_sets")),
        sa.UniqueConstraint("name", name=op.f("uq_data_sets_name")),
    )
    op.create_table(
        "deployments",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column(
            "phase",
            sa.Enum(
                "starting",
                "loading",
                "warming",
                "ready",
                "draining",
                "stopping",
                name="phase",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=True,
        ),
        sa.Column("engine", sa.String(length=16), nullable=False),
        sa.Column("verifier", sa.Text(), nullable=False),
        sa.Column("speculator", sa.Text(), nullable=True),
        sa.Column("speculative_tokens", sa.Integer(), nullable=False),
        sa.Column("served_name", sa.String(length=255), nullable=False),
        sa.Column("endpoint", sa.String(length=255), nullable=True),
        sa.Column("command", sa.JSON(), nullable=True),
        sa.Column(
            "trace_mode",
            sa.Enum(
                "ids",
                "counts",
                "off",
                name="trace_mode",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("server_pgid", sa.Integer(), nullable=True),
        sa.Column("server_started", sa.Double(), nullable=True),
        sa.Column("notes", sa.JSON(), nullable=False),
        sa.Column("dropped_records", sa.Integer(), nullable=False),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_deployments_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_deployments")),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=True),
        sa.Column("speculator", sa.Text(), nullable=False),
        sa.Column("verifier", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("speculative_tokens", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("acceptance_length", sa.Double(), nullable=False),
        sa.Column("acceptance_rate", sa.Double(), nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=False),
        sa.Column("tokens_per_second_plain", sa.Double(), nullable=True),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
    )
    op.create_index(op.f("ix_evaluations_speculator"), "evaluations", ["speculator"], unique=False)
    op.create_table(
        "generations",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("user", sa.String(length=255), nullable=False),
        sa.Column("deployment_id", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("plain", sa.Boolean(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("steps", sa.JSON(), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["deployment_id"],
            ["runs.id"],
            name=op.f("fk_generations_deployment_id_runs"),
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_generations")),
    )
    op.create_index(op.f("ix_generations_user"), "generations", ["user"], unique=False)
    op.create_table(
        "gpu_leases",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "gpu",
                "jobs",
                "serving",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("device", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=True),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("host_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_gpu_leases_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu_leases")),
    )
    op.create_index(op.f("ix_gpu_leases_host"), "gpu_leases", ["host"], unique=False)
    op.create_index(op.f("ix_gpu_leases_run_id"), "gpu_leases", ["run_id"], unique=False)
    op.create_table(
        "run_dependencies",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("needs_id", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["needs_id"],
            ["runs.id"],
            name=op.f("fk_run_dependencies_needs_id_runs"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
            name=op.f("fk_run_dependencies_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "needs_id", name=op.f("pk_run_dependencies")),
    )
    op.create_index(
        op.f("ix_run_dependencies_needs_id"), "run_dependencies", ["needs_id"], unique=False
    )
    op.create_table(
        "run_metrics",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_run_metrics_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run_metrics")),
        sa.UniqueConstraint("run_id", "step", name=op.f("uq_run_metrics_run_id")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "speculators",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("verifier", sa.Text(), nullable=False),
        sa.Column("algorithm", sa.String(length=16), nullable=False),
        sa.Column("draft_vocab_size", sa.Integer(), nullable=False),
        sa.Column("speculative_tokens", sa.Integer(), nullable=False),
        sa.Column("deployable", sa.Boolean(), nullable=False),
        sa.Column("doubts", sa.JSON(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_speculators_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_speculators")),
        sa.UniqueConstraint("name", name=op.f("uq_speculators_name")),
    )
    op.create_table(
        "verifiers",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("architecture", sa.String(length=255), nullable=False),
        sa.Column("hidden_size", sa.Integer(), nullable=False),
        sa.Column("num_layers", sa.Integer(), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("tokenizer_fingerprint", sa.String(length=255), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_verifiers_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verifiers")),
        sa.UniqueConstraint("name", name=op.f("uq_verifiers_name")),
    )


def downgrade() -> None:
    op.drop_table("verifiers")
    op.drop_table("speculators")
    op.drop_table("run_metrics")
    op.drop_table("run_dependencies")
    op.drop_table("gpu_leases")
    op.drop_table("generations")
    op.drop_table("evaluations")
    op.drop_table("deployments")
    op.drop_table("data_sets")
    op.drop_table("acceptance_samples")
    op.drop_table("runs")
