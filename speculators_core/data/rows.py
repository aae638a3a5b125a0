"""Rows of data files: JSON lines, a JSON array, Parquet. One row in memory at a time, about.

The format is told from the file's first bytes, never from its name. A row is a JSON object; its
number is its line in JSON lines, its place from 1 in the other two. Light: no torch; Parquet is
read through pyarrow, which is imported where it is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from speculators_core.errors import DataError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")
_PIECE = 1 << 20  # characters of an array read at once
_LARGEST_ROW = 1 << 26  # characters; what is longer is no row but a broken file
_BATCH = 256  # rows of Parquet decoded at once


class Row(NamedTuple):
    """A row, and which share of its file is read with it."""

    number: int
    values: dict[str, Any]
    done: float


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a file in order. Raises `DataError` naming the row that can't be right."""
    try:
        with file.open("rb") as content:
            start = content.read(4)
            content.seek(0)
            if start == b"PAR1":
                yield from _parquet(file)
            elif _first_character(content) == b"[":
                yield from _array(file)
            else:
                yield from _lines(content, file)
    except FileNotFoundError:
        raise DataError(
            "the data file does not exist", where=str(file), hint="give the path of a data file"
        ) from None
    except IsADirectoryError:
        raise DataError("the data is a directory, expected a file", where=str(file)) from None
    except OSError as error:
        raise DataError(f"the data can't be read: {error.strerror}", where=str(file)) from error


def files_of(place: Path, split: str | None) -> list[Path]:
    """The data files that a path means: itself, or those of a split in a directory laid out like
    a data set of the hub (`train-00000-of-00002.parquet`, `main/train.jsonl`, `train/…`).

    Raises `DataError` where it is not clear which files those are.
    """
    if not place.is_dir():
        if split is not None:
            raise DataError(
                f"a split ({split}) is chosen of a single file",
                where=str(place),
                hint="splits are those of a hub data set or of a directory of files",
            )
        return [place]
    names = [
        str(file.relative_to(place))
        for file in sorted(place.rglob("*"))
        if file.suffix in SUFFIXES and file.is_file()
    ]
    return [place / name for name in chosen_files(names, split, str(place))]


def chosen_files(names: Sequence[str], split: str | None, where: str) -> list[str]:
    """Of a data set's files, those of a split (none given: `train`, or the only file)."""
    data = sorted(name for name in names if name.endswith(SUFFIXES) and not _hidden(name))
    wanted = re.compile(rf"(^|/){re.escape(split or 'train')}(/|[-_]?\d|\.)")
    found = [name for name in data if wanted.search(name)]
    found = [name for name in found if name.endswith(".parquet")] or found
    if not found and split is None and len(data) == 1:
        return data
    folders = sorted({name.rpartition("/")[0] or "." for name in found})
    if len(folders) != 1:
        raise _unclear(split or "train", data, folders, where)
    return found


def _unclear(split: str, data: Sequence[str], folders: Sequence[str], where: str) -> DataError:
    """No folder has files of the split, or several have."""
    listed = f"files: {', '.join(data[:8]) or 'none'}{', …' if len(data) > 8 else ''}"
    if folders:
        return DataError(
            f"it is not clear which files are the split {split}: expected them in one folder, "
            f"found them in {', '.join(folders)}",
            where=where,
            hint=f"name the folder, too, as in --split {folders[-1]}/{split}; {listed}",
        )
    wanted = f"expected files named {split} or in a folder {split}, as .jsonl, .json or .parquet"
    return DataError(
        f"it is not clear which files are the split {split}: {wanted}, "
        f"found {len(data)} data files and none of that name",
        where=where,
        hint=f"name a split that is there with --split, or give the path of a file; {listed}",
    )


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _first_character(content: BinaryIO) -> bytes:
    """Of the text, blanks and a byte order mark apart; the place in the file is kept."""
    while blank := content.read(256):
        if text := blank.removeprefix(b"\xef\xbb\xbf").lstrip():
            content.seek(0)
            return text[:1]
    content.seek(0)
    return b""


def _lines(content: BinaryIO, file: Path) -> Iterator[Row]:
    size, read = max(file.stat().st_size, 1), 0
    pieces = iter(lambda: content.readline(_LARGEST_ROW + 1), b"")
    for number, line in enumerate(pieces, 1):
        if len(line) > _LARGEST_ROW:
            raise DataError(
                f"the line is longer than {_LARGEST_ROW} bytes",
                where=f"{file}:{number}",
                hint="one JSON object a line, or one array of objects",
            )
        read += len(line)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield Row(number, _object(_text(line, file, number), file, number), read / size)


def _text(line: bytes, file: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the line is not UTF-8 text (byte {error.start})",
            where=f"{file}:{number}",
            hint="one JSON object a line, as UTF-8",
        ) from error


def _object(text: str, file: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the line is not JSON: {error}",
            where=f"{file}:{number}",
            hint="one JSON object a line, or one array of objects",
        ) from error
    return _row(value, file, number)


def _row(value: Any, file: Path, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"expected a row that is a JSON object, found {type(value).__name__} {value!r:.60}",
            where=f"{file}:{number}",
            hint='write {"messages": […]} or {"text": "…"}, one object a row',
        )
    return value


def _array(file: Path) -> Iterator[Row]:
    """The items of one array, decoded as they arrive."""
    with file.open(encoding="utf-8-sig") as content:
        reader = _ArrayReader(content, file)
        reader.expect("[")
        number = 0
        while not reader.ends_with("]"):
            if number:
                reader.expect(",")
            number += 1
            yield Row(number, _row(reader.value(number), file, number), reader.done)


class _ArrayReader:
    """A JSON text of which a stretch is in memory."""

    def __init__(self, content: TextIO, file: Path) -> None:
        self._content, self._file = content, file
        self._size = max(file.stat().st_size, 1)
        self._text, self._at, self._taken = "", 0, 0
        self._decoder = json.JSONDecoder()

    @property
    def done(self) -> float:
        return min((self._taken + self._at) / self._size, 1.0)

    def expect(self, sign: str) -> None:
        if self._next() != sign:
            raise self._broken(f"expected {sign!r}, found {self._next() or 'the end'!r}")
        self._at += 1

    def ends_with(self, sign: str) -> bool:
        return self._next() == sign

    def value(self, number: int) -> Any:
        self._next()
        wanted = _PIECE
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise self._broken(f"item {number} is nested too deep") from error
            except ValueError as error:
                # cut off, or wrong: more text tells
                if len(self._text) - self._at > _LARGEST_ROW or not self._more(wanted):
                    raise self._broken(f"item {number} is not JSON: {error.args[0]}") from error
                wanted *= 2
                continue
            self._at = end
            return value

    def _next(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(_PIECE):
                return ""

    def _more(self, count: int) -> bool:
        try:
            text = self._content.read(count)
        except UnicodeDecodeError as error:
            raise self._broken("the file is not UTF-8 text") from error
        self._taken += self._at
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(text)

    def _broken(self, why: str) -> DataError:
        return DataError(
            f"the JSON array can't be read: {why}",
            where=str(self._file),
            hint="an array of objects, or one JSON object a line",
        )


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            total = max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, _without_nulls(values), number / total)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"the Parquet file can't be read after row {number}: {str(error).splitlines()[0]}",
            where=str(file),
            hint="copy or download it again",
        ) from error


def _without_nulls(value: Any) -> Any:
    """Columns hold a null where a row has no such key, at every depth."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
