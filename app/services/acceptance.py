"""What the traffic of a deployment accepted: one row a request, summed when looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import select

from app.services.views import AcceptanceView, View
from app.store.engine import reading, writing
from app.store.models import AcceptanceSample


class RequestAcceptance(View):
    """One request: `accepted_per_step` has one number a step that drafted."""

    request_id: str
    accepted_per_step: tuple[int, ...]
    drafted: int
    tokens: int
    context_len: int
    speculative_tokens: int

    def per_position(self) -> list[int]:
        """How many steps accepted position k and all before it, for k < K."""
        return [
            sum(accepted > k for accepted in self.accepted_per_step)
            for k in range(self.speculative_tokens)
        ]


def record(deployment_id: str, requests: Iterable[RequestAcceptance]) -> None:
    """Add finished requests, in one transaction."""
    rows = [
        AcceptanceSample(
            deployment_id=deployment_id,
            request_id=request.request_id[:255],
            steps=len(request.accepted_per_step),
            drafted=request.drafted,
            accepted=sum(request.accepted_per_step),
            per_position=request.per_position(),
            accepted_per_step=bytes(min(255, n) for n in request.accepted_per_step),
            context_len=request.context_len,
            tokens=request.tokens,
        )
        for request in requests
    ]
    if rows:
        with writing() as session:
            session.add_all(rows)


def totals(deployment_id: str, last: int = 1000) -> AcceptanceView:
    """Sums over the last requests of a deployment; steps weigh equally, whoever asked."""
    with reading() as session:
        rows = session.scalars(
            select(AcceptanceSample)
            .where(AcceptanceSample.deployment_id == deployment_id)
            .order_by(AcceptanceSample.at.desc())
            .limit(last)
        ).all()
    steps = sum(row.steps for row in rows)
    positions = _columns([row.per_position for row in rows])
    return AcceptanceView(
        requests=len(rows),
        steps=steps,
        drafted=sum(row.drafted for row in rows),
        accepted=sum(row.accepted for row in rows),
        tokens=sum(row.tokens for row in rows),
        per_position=tuple(count / steps for count in positions) if steps else (),
    )


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max((len(row) for row in rows), default=0)
    return [sum(row[k] for row in rows if k < len(row)) for k in range(width)]
