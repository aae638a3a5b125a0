-- A store as the first release wrote it (sqlite3 .dump).
BEGIN TRANSACTION;
CREATE TABLE acceptance_samples (
	id INTEGER NOT NULL, 
	deployment_id VARCHAR(255) NOT NULL, 
	request_id VARCHAR(255) NOT NULL, 
	at DATETIME NOT NULL, 
	steps INTEGER NOT NULL, 
	drafted INTEGER NOT NULL, 
	accepted INTEGER NOT NULL, 
	per_position JSON NOT NULL, 
	accepted_per_step BLOB NOT NULL, 
	context_len INTEGER NOT NULL, 
	tokens INTEGER NOT NULL, 
	CONSTRAINT pk_acceptance_samples PRIMARY KEY (id), 
	CONSTRAINT fk_acceptance_samples_deployment_id_runs FOREIGN KEY(deployment_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE data_sets (
	id VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	path TEXT NOT NULL, 
	digest VARCHAR(255) NOT NULL, 
	samples INTEGER NOT NULL, 
	facts JSON NOT NULL, 
	run_id VARCHAR(255), 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_data_sets PRIMARY KEY (id), 
	CONSTRAINT fk_data_sets_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id), 
	CONSTRAINT uq_data_sets_name UNIQUE (name)
);
CREATE TABLE deployments (
	run_id VARCHAR(255) NOT NULL, 
	phase VARCHAR(16), 
	engine VARCHAR(16) NOT NULL, 
	verifier TEXT NOT NULL, 
	speculator TEXT, 
	speculative_tokens INTEGER NOT NULL, 
	served_name VARCHAR(255) NOT NULL, 
	endpoint VARCHAR(255), 
	command JSON, 
	trace_mode VARCHAR(16) NOT NULL, 
	server_pgid INTEGER, 
	server_started DOUBLE, 
	notes JSON NOT NULL, 
	dropped_records INTEGER NOT NULL, 
	ready_at DATETIME, 
	CONSTRAINT pk_deployments PRIMARY KEY (run_id), 
	CONSTRAINT fk_deployments_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT ck_deployments_phase CHECK (phase IN ('starting', 'loading', 'warming', 'ready', 'draining', 'stopping')), 
	CONSTRAINT ck_deployments_trace_mode CHECK (trace_mode IN ('ids', 'counts', 'off'))
);
CREATE TABLE evaluations (
	id VARCHAR(255) NOT NULL, 
	run_id VARCHAR(255), 
	speculator TEXT NOT NULL, 
	verifier TEXT NOT NULL, 
	data TEXT NOT NULL, 
	engine TEXT NOT NULL, 
	speculative_tokens INTEGER NOT NULL, 
	temperature DOUBLE NOT NULL, 
	acceptance_length DOUBLE NOT NULL, 
	acceptance_rate DOUBLE NOT NULL, 
	tokens_per_second DOUBLE NOT NULL, 
	tokens_per_second_plain DOUBLE, 
	report JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_evaluations PRIMARY KEY (id), 
	CONSTRAINT fk_evaluations_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE generations (
	id VARCHAR(255) NOT NULL, 
	user VARCHAR(255) NOT NULL, 
	deployment_id VARCHAR(255), 
	created_at DATETIME NOT NULL, 
	messages JSON NOT NULL, 
	sampling JSON NOT NULL, 
	plain BOOLEAN NOT NULL, 
	text TEXT NOT NULL, 
	steps JSON NOT NULL, 
	numbers JSON NOT NULL, 
	CONSTRAINT pk_generations PRIMARY KEY (id), 
	CONSTRAINT fk_generations_deployment_id_runs FOREIGN KEY(deployment_id) REFERENCES runs (id) ON DELETE SET NULL
);
CREATE TABLE gpu_leases (
	id VARCHAR(255) NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	device INTEGER NOT NULL, 
	run_id VARCHAR(255), 
	taken_at DATETIME, 
	heartbeat_at DATETIME, 
	host_seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_gpu_leases PRIMARY KEY (id), 
	CONSTRAINT fk_gpu_leases_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id), 
	CONSTRAINT ck_gpu_leases_kind CHECK (kind IN ('gpu', 'jobs', 'serving'))
);
CREATE TABLE run_dependencies (
	run_id VARCHAR(255) NOT NULL, 
	needs_id VARCHAR(255) NOT NULL, 
	CONSTRAINT pk_run_dependencies PRIMARY KEY (run_id, needs_id), 
	CONSTRAINT fk_run_dependencies_needs_id_runs FOREIGN KEY(needs_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_run_dependencies_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE run_metrics (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id VARCHAR(255) NOT NULL, 
	step INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	"values" JSON NOT NULL, 
	CONSTRAINT fk_run_metrics_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_run_metrics_run_id UNIQUE (run_id, step)
);
INSERT INTO "run_metrics" VALUES(1,'0old0run00',10,'2026-11-01 10:30:00.000000','{"loss": 1.5}');
CREATE TABLE runs (
	id VARCHAR(255) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	params JSON NOT NULL, 
	fingerprint VARCHAR(255) NOT NULL, 
	idempotency_key VARCHAR(255), 
	owner VARCHAR(255) NOT NULL, 
	priority INTEGER NOT NULL, 
	replaces_id VARCHAR(255), 
	attempt INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	finished_at DATETIME, 
	updated_at DATETIME NOT NULL, 
	heartbeat_at DATETIME, 
	woken_at DATETIME, 
	host VARCHAR(255), 
	job_pgid INTEGER, 
	job_started DOUBLE, 
	progress DOUBLE, 
	progress_text TEXT NOT NULL, 
	eta_s DOUBLE, 
	result JSON, 
	error JSON, 
	CONSTRAINT pk_runs PRIMARY KEY (id), 
	CONSTRAINT fk_runs_replaces_id_runs FOREIGN KEY(replaces_id) REFERENCES runs (id), 
	CONSTRAINT uq_runs_idempotency_key UNIQUE (idempotency_key), 
	CONSTRAINT ck_runs_kind CHECK (kind IN ('verifier', 'self_write', 'prepare', 'train', 'evaluate', 'convert', 'deploy')), 
	CONSTRAINT ck_runs_state CHECK (state IN ('queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled', 'lost'))
);
INSERT INTO "runs" VALUES('0old0run00','train','an old training','succeeded','{"data": "d", "verifier": "v"}','00',NULL,'ada',0,NULL,1,'2026-11-01 10:00:00.000000','2026-11-01 10:00:01.000000','2026-11-01 11:00:00.000000','2026-11-01 11:00:00.000000',NULL,NULL,NULL,NULL,NULL,1.0,'done',NULL,'{"output": "/models/old", "name": "old"}',NULL);
CREATE TABLE speculators (
	id VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	path TEXT NOT NULL, 
	verifier TEXT NOT NULL, 
	algorithm VARCHAR(16) NOT NULL, 
	draft_vocab_size INTEGER NOT NULL, 
	speculative_tokens INTEGER NOT NULL, 
	deployable BOOLEAN NOT NULL, 
	doubts JSON NOT NULL, 
	run_id VARCHAR(255), 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_speculators PRIMARY KEY (id), 
	CONSTRAINT fk_speculators_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id), 
	CONSTRAINT uq_speculators_name UNIQUE (name)
);
CREATE TABLE verifiers (
	id VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	path TEXT NOT NULL, 
	source TEXT NOT NULL, 
	architecture VARCHAR(255) NOT NULL, 
	hidden_size INTEGER NOT NULL, 
	num_layers INTEGER NOT NULL, 
	vocab_size INTEGER NOT NULL, 
	tokenizer_fingerprint VARCHAR(255) NOT NULL, 
	run_id VARCHAR(255), 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_verifiers PRIMARY KEY (id), 
	CONSTRAINT fk_verifiers_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id), 
	CONSTRAINT uq_verifiers_name UNIQUE (name)
);
CREATE INDEX ix_runs_created_at ON runs (created_at);
CREATE INDEX ix_runs_fingerprint ON runs (fingerprint);
CREATE INDEX ix_runs_state_priority ON runs (state, priority, created_at);
CREATE INDEX ix_acceptance_samples_deployment_at ON acceptance_samples (deployment_id, at);
CREATE INDEX ix_evaluations_speculator ON evaluations (speculator);
CREATE INDEX ix_generations_user ON generations (user);
CREATE INDEX ix_gpu_leases_host ON gpu_leases (host);
CREATE INDEX ix_gpu_leases_run_id ON gpu_leases (run_id);
CREATE INDEX ix_run_dependencies_needs_id ON run_dependencies (needs_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('run_metrics',1);
COMMIT;
