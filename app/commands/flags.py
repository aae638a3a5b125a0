"""Flags made from parameter models, so that names, defaults and help are written once.

Every flag arrives as text and only if it was given; the model itself parses it. Dashes stand for
underscores, commas part the members of a tuple, `none` empties a field that may be empty.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from app.commands.output import Misuse
from speculators_core.errors import InputError
from speculators_core.params import Params, SomeParams, parse_model

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML or JSON of parameters; flags override it."),
]
_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def with_flags(
    body: Callable[..., None],
    model: type[Params],
    *,
    positional: str | Sequence[str] | None = None,
    optional_positional: bool = False,
) -> Callable[..., None]:
    """`body(flags, **own)` as a function that Typer reads: the model's fields, then its own.

    `flags` is what was given on the command line, field name to raw value. `positional` names
    the field that needs no flag, or several in their order; a tuple takes many values.
    """
    fields = model.model_fields
    words = (positional,) if isinstance(positional, str) else tuple(positional or ())

    def command(**values: Any) -> None:
        given = {name: _raw(fields[name], values.pop(name)) for name in fields}
        body({n: v for n, v in given.items() if v is not _ABSENT}, **values)

    made = [_argument(n, fields[n], optional_positional) for n in words]
    made += [_parameter(n, f) for n, f in fields.items() if n not in words]
    own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*made, *own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    command.__doc__ = body.__doc__ or model.__doc__
    return command


def parse(model: type[SomeParams], values: Mapping[str, Any]) -> SomeParams:
    """The parameters that the flags make; `Misuse` names the flag that is wrong or missing."""
    missing = [n for n, f in model.model_fields.items() if f.is_required() and n not in values]
    if missing:
        flag = flag_of(missing[0])
        raise Misuse(f"{flag} is missing", where=flag, hint="--help lists every flag")
    try:
        return parse_model(model, values, "the command line")
    except InputError as error:
        raise Misuse(error.message, where=error.where, hint=error.hint) from error


def read_config(path: Path | None, model: type[Params]) -> dict[str, Any]:
    """Parameters of a model from a YAML file (JSON is YAML too); none where there is no file to
    read. `Misuse` where it can't be read, or a key is none of the model's."""
    if path is None:
        return {}
    where = f"--config {path}"
    values = _mapping(path, where)
    unknown = [str(key) for key in values if key not in model.model_fields]
    if unknown:
        known = ", ".join(model.model_fields)
        raise Misuse(
            f"no such parameter: {', '.join(unknown)}", where=where, hint=f"known: {known}"
        )
    return values


def _mapping(path: Path, where: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Misuse("there is no such file", where=where) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise Misuse(f"not YAML or JSON: {error}", where=where) from error
    if not isinstance(values, dict):
        raise Misuse("not a mapping of parameter names to values", where=where)
    return values


def flag_of(field: str) -> str:
    """`aux_layers` → `--aux-layers`."""
    return f"--{field.replace('_', '-')}"


class _Absent:
    """A flag that was not given (None is a value)."""


_ABSENT = _Absent()


def _raw(field: FieldInfo, given: Any) -> Any:
    if given is None or given == []:
        return _ABSENT
    kinds = _kinds(field.annotation)
    if isinstance(given, str) and type(None) in kinds and given.lower() in ("", "none"):
        return None
    if isinstance(given, str) and any(get_origin(kind) is tuple for kind in kinds):
        return [part.strip() for part in given.split(",")]
    return given


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = flag_of(name)
    is_switch = bool in _kinds(field.annotation)
    if is_switch:
        flag = f"{flag}/--no-{name.replace('_', '-')}"
    option = typer.Option(
        flag,
        help=_sentence(field) + _default(field),
        show_default=False,  # said in the help, for the flag itself defaults to "not given"
        metavar=None if is_switch else _metavar(field),
    )
    if is_switch:
        return _keyword(name, Annotated[bool | None, option], None)
    return _keyword(name, Annotated[str | None, option], None)


def _argument(name: str, field: FieldInfo, optional: bool) -> inspect.Parameter:
    many = any(get_origin(kind) is tuple for kind in _kinds(field.annotation))
    info = typer.Argument(help=_sentence(field), metavar=name.upper(), show_default=False)
    if many:
        return _keyword(name, Annotated[list[str], info], inspect.Parameter.empty)
    if optional:
        return _keyword(name, Annotated[str | None, info], None)
    return _keyword(name, Annotated[str, info], inspect.Parameter.empty)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _kinds(annotation: Any) -> Sequence[Any]:
    """The alternatives of a field's type, `Annotated` taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


def _metavar(field: FieldInfo) -> str:
    for kind in _kinds(field.annotation):
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
        if get_origin(kind) is tuple:
            return "A,B,…"
        if kind in _METAVARS:
            return _METAVARS[kind]
    return "VALUE"


def _sentence(field: FieldInfo) -> str:
    text = field.description or ""
    return text[:1].upper() + text[1:]


def _default(field: FieldInfo) -> str:
    if field.is_required() or field.default in (None, ()):
        return ""
    if isinstance(field.default, bool):
        return f"  [default: {'yes' if field.default else 'no'}]"
    return f"  [default: {field.default}]"
