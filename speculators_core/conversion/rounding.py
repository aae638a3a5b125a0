"""A plan in another precision than its checkpoint's, where a person asks. Light: no torch."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel

from speculators_core.conversion.plan import ConfigValue, Plan, TensorRow
from speculators_core.errors import InputError
from speculators_core.params import ConvertParams


def in_precision(plan: Plan, params: ConvertParams) -> Plan:
    """The plan with `params.dtype`; the plan itself for `keep`."""
    if params.dtype == "keep":
        return plan
    config = plan.config
    if not isinstance(config, BaseModel) or "dtype" not in type(config).model_fields:
        raise InputError(
            f"a result for {config.algorithm} keeps its checkpoint's precision",
            where="dtype",
            hint="leave dtype at keep",
        )
    config = config.model_copy(update={"dtype": params.dtype})
    rounded = replace(plan, config=config)
    inspection = plan.inspection.model_copy(
        update={
            "tensors": [_row(row, rounded) for row in plan.inspection.tensors],
            "config": {
                **plan.inspection.config,
                "dtype": ConfigValue(value=params.dtype, origin="parameter"),
            },
        }
    )
    return replace(rounded, inspection=inspection)


def _row(row: TensorRow, plan: Plan) -> TensorRow:
    if row.target is None or row.how == "part":
        return row
    dtype = plan.config.tensor_dtype(row.target)
    if dtype == row.dtype:
        return row
    return row.model_copy(
        update={"dtype": dtype, "reason": f"{row.reason}, written as {dtype} as asked for"}
    )
