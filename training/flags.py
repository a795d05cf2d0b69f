"""The flags of a command, read by tyro in one pass.

Settings have defaults that depend on the model and the data set, so a flag that was not given must
leave no trace: settings are parsed as a TypedDict that holds the given ones only.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro

from .config import RunConfig
from .recipe_text import files_named, read_again
from .rundir import UsageError
from .runs import RUNS, defaults
from .settings import Settings
from .toml import read_toml

__all__ = ["parse", "parse_settings", "resolve"]

T = TypeVar("T")


def parse(cls: type[T], program: str, argv: Sequence[str], text: str) -> T:
    """Parse the flags of a command into a record.

    Raises:
        SystemExit: 2 on flags that do not exist or values of another type, 0 after --help.
    """
    options = (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(cls, prog=program, description=text, args=list(argv), config=options)


def parse_settings(
    cls: type[T], settings: type[Settings], model: str, argv: Sequence[str], text: tuple[str, str]
) -> tuple[T, dict[str, Any]]:
    """Parse the flags of a command that trains a model: its own flags, and the settings given.

    Args:
        cls: the record of the command's own flags.
        settings: the record whose fields are flags, too.
        model: a row of `RUNS`; help shows its defaults.
        argv: the words of the command line.
        text: the program's name, and what its help says.
    """
    given = ("training", tyro.conf.OmitArgPrefixes[_flags(settings, model)])  # type: ignore[misc]
    both = dataclasses.make_dataclass(
        cls.__name__, [given], bases=(cls,), frozen=True, kw_only=True
    )
    made: Any = parse(both, text[0], argv, text[1])
    return cast(T, made), dict(made.training)


def _flags(settings: type[Settings], model: str) -> Any:
    """A TypedDict type with the fields of a record, all of them optional."""
    types = typing.get_type_hints(settings)
    rows = {
        field.name: Annotated[
            types[field.name],
            tyro.conf.arg(
                help=field.metadata["doc"],
                help_behavior_hint=f"(default: {_default(field, model)})",
            ),
        ]
        for field in dataclasses.fields(settings)
        if "doc" in field.metadata
    }
    return typing.TypedDict("settings", rows, total=False)  # type: ignore[operator]


def _default(field: dataclasses.Field[Any], model: str) -> str:
    """Describe a setting's default for a model, and where other data sets have another."""
    row = RUNS[model]
    default = field.default if field.default is not dataclasses.MISSING else None
    value = defaults(model).get(field.name, default)
    others: dict[Any, list[str]] = {}
    for dataset in row.datasets:
        other = defaults(model, dataset).get(field.name, default)
        if field.name != "dataset" and other != value:
            others.setdefault(other, []).append(dataset)
    shown = "none" if value == "" else str(value)
    return "; ".join(
        [shown, *(f"{other} for {', '.join(names)}" for other, names in others.items())]
    )


def resolve(
    model: str, given: dict[str, Any], file: Path | None, known: type[Settings] = RunConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All values of a run, and those that the user gave in a file or by flags.

    The last one wins of: the model's row for the data set, the file, the flags.

    Raises:
        UsageError: for an unknown model or setting, or a file that cannot be read.
    """
    try:
        names = [field.name for field in dataclasses.fields(known)]
        from_file = read_toml(file, names) if file else {}
        if from_file.get("model", model) != model:
            raise ValueError(f"--config {file}: is for model {from_file['model']!r}, not {model!r}")
        explicit = {**from_file, **given}
        if "recipe_text" in from_file:  # a file that a flag names is read anew
            anew = files_named(given.get("recipe", ""), given.get("operands", ""))
            explicit["recipe_text"] = read_again(from_file["recipe_text"], anew)
        return {**defaults(model, explicit.get("dataset")), **explicit}, explicit
    except ValueError as error:
        raise UsageError(str(error)) from error
