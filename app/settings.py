"""All settings of Speclab: name, type, default, meaning. Environment prefix `SPECLAB_`.

Light enough for every process: the web process, the workers, the job processes, the CLI.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from speculators_core.errors import InputError

_LONGEST_SOCKET_PATH = 100  # the kernel has room for 107 bytes


class Settings(BaseSettings):
    """Read once at start from the environment; unknown `SPECLAB_` names are left alone."""

    model_config = SettingsConfigDict(env_prefix="SPECLAB_", frozen=True, extra="ignore")

    home: Path = Field(Path.home() / ".speclab", description="where everything is kept")
    database_url: str | None = Field(
        None, description="SQLAlchemy URL; empty: SQLite at SPECLAB_HOME/speclab.db"
    )
    broker_url: str | None = Field(
        None, description="redis:// URL; empty: the embedded Valkey of this machine"
    )
    host: str = Field("127.0.0.1", description="address the app listens on")
    port: int = Field(7860, description="port the app listens on")
    url: str | None = Field(None, description="a lab's address; the CLI then talks to it")
    token: str | None = Field(None, description="API token the CLI sends to SPECLAB_URL")
    worker_host: str | None = Field(
        None, description="this host's name in the lab; empty: hostname"
    )
    gpus: str | None = Field(None, description="GPU indices this worker offers; empty: all found")
    job_slots: int = Field(1, ge=0, description="jobs at once on a machine without GPUs")
    serving_slots: int = Field(1, ge=0, description="deployments at once on a machine without GPUs")
    heartbeat_seconds: float = Field(2.0, gt=0, description="between signs of life")
    lost_after_seconds: float = Field(20.0, gt=0, description="silence after which a run is lost")
    max_attempts: int = Field(3, ge=1, description="times a run that can resume is started")
    stop_grace_seconds: float = Field(20.0, gt=0, description="between TERM and KILL")
    roots: str | None = Field(
        None,
        description="further directories, joined by `:`, whose files pages and REST may name "
        "(beside the home directory, SPECLAB_HOME and the hub cache)",
    )
    demo_scale: Literal["full", "small"] = Field(
        "full", description="small: a demo of minutes with a weak speculator, for tests"
    )
    cache_days: float | None = Field(
        None,
        ge=0,
        description="hidden states and other caches that nobody used for so long are removed by "
        "the worker; empty: never",
    )
    trace_stream_length: int = Field(20_000, ge=1, description="trace records kept a deployment")

    @field_validator("home")
    @classmethod
    def _same_from_every_directory(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("database_url", "broker_url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url and "://" not in url:  # not shown: it may hold a password
            raise ValueError("should be a URL, such as postgresql://… or redis://…")
        return url

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'speclab.db'}"

    @property
    def has_store(self) -> bool:
        """Whether there is one to ask: looking must not create an empty SQLite file."""
        kind, _, file = self.store_url.partition(":///")
        return not kind.startswith("sqlite") or Path(file).exists()

    @property
    def broker_socket(self) -> Path:
        """The embedded broker's Unix socket; under /tmp where SPECLAB_HOME is too long for one."""
        socket = self.home / "broker" / "s"
        if len(os.fsencode(socket)) <= _LONGEST_SOCKET_PATH:
            return socket
        digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:12]
        return Path(f"/tmp/speclab-{os.getuid()}-{digest}") / "s"

    @property
    def redis_url(self) -> str:
        """For redis-py."""
        return self.broker_url or f"unix://{self.broker_socket}"

    @property
    def celery_broker_url(self) -> str:
        """For Celery, which spells a Unix socket its own way."""
        return self.broker_url or f"redis+socket://{self.broker_socket}"

    def run_dir(self, run_id: str) -> Path:
        """`params.json`, `log.txt`, `artifacts/` of a run."""
        return self.home / "runs" / run_id


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process. Raises `InputError` that names the variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = f"SPECLAB_{str(first['loc'][0]).upper()}"
        said = str(first["msg"]).removeprefix("Value error, ")
        raise InputError(
            f"{name}: {said}", where=name, hint="correct or unset this environment variable"
        ) from None
