"""Readers of documents from one text, JSON-lines or Parquet file, or from a Hugging Face data set.

Readers yield texts exactly as stored, skip empty ones, and raise a DataError that names the place (file and line or
row) of invalid data. `sources` decides which files to read, and in which order.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.core.errors import DataError
from thinpipe.core.extras import require_extra

DOCUMENT_SEPARATOR = "<|endoftext|>"
"""Separator of documents in a .txt file: a line that contains only this text."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET_ROWS_PER_READ = 64  # documents may be whole books


class Document(NamedTuple):
    text: str
    read_nbytes: int
    """Bytes of the source read for this document, for progress bars; an average for Parquet."""
    where: str = ""
    """File and line or row; of chats only."""


Reader = Callable[[Path, str], Iterator[Document]]
"""Reads a file; arguments are the path and the name of the field that holds the text."""


def read_txt(path: Path, _field: str) -> Iterator[Document]:
    """One document per file, or several separated by DOCUMENT_SEPARATOR lines."""
    separator = DOCUMENT_SEPARATOR.encode()
    data, first_line, read_nbytes = bytearray(), 1, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            read_nbytes += len(line)
            if line.strip() != separator:
                data += line
                continue
            if data:
                yield Document(decode_text(data, path, first_line), read_nbytes)
            data, first_line, read_nbytes = bytearray(), number + 1, 0
    if data:
        yield Document(decode_text(data, path, first_line), read_nbytes)


def read_jsonl(path: Path, field: str) -> Iterator[Document]:
    """One document per line, a JSON object; blank lines are skipped."""
    for record in jsonl_records(path, f'write {{"{field}": "..."}}'):
        if text := _text_of(record.fields, field, record.where):
            yield Document(text, record.read_nbytes)


def read_parquet(path: Path, field: str) -> Iterator[Document]:
    for record in parquet_records(path, field):
        if text := _text_of(record.fields, field, record.where):
            yield Document(text, record.read_nbytes)


def read_huggingface(name: str, config: str | None, split: str, field: str) -> Iterator[Document]:
    """Streams a data set, so that reading starts at once and no text is stored on the disk."""
    for record in huggingface_records(name, config, split):
        if text := _text_of(record.fields, field, record.where):
            yield Document(text, len(text.encode()))


class Record(NamedTuple):
    """A JSON object, or a row of a table."""

    fields: dict[str, Any]
    where: str
    read_nbytes: int
    """As in `Document`; 0 for data sets."""


def jsonl_records(path: Path, hint: str) -> Iterator[Record]:
    """`hint`: what to write where a line is no object."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                fields = json.loads(decode_text(line, path, number))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}: not JSON ({error.msg} at column {error.colno}); write one object per line"
                ) from None
            if not isinstance(fields, dict):
                raise DataError(f"{where}: not an object; {hint}")
            yield Record(fields, where, len(line))


def parquet_records(path: Path, field: str | None) -> Iterator[Record]:
    """Rows with this column, or with all of them."""
    require_extra("pyarrow", extra="parquet", feature=f"{path}, a Parquet file,")
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        with ParquetFile(path) as file:
            if field is not None and field not in file.schema_arrow.names:
                raise DataError(_no_such_field(field, file.schema_arrow.names, str(path)))
            row, nbytes_per_row = 0, path.stat().st_size // max(1, file.metadata.num_rows)
            columns = None if field is None else [field]
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS_PER_READ, columns=columns):
                for fields in batch.to_pylist():
                    row += 1
                    yield Record(fields, f"{path}, row {row}", nbytes_per_row)
    except ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}): copy or download it again") from error


def huggingface_records(name: str, config: str | None, split: str) -> Iterator[Record]:
    require_extra("datasets", extra="hf", feature=f"hf:{name}")
    import datasets  # type: ignore[import-untyped]

    where = f"hf:{name}{f':{config}' if config else ''}, split {split}"
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {error}. Check the name, the configuration and the split") from error
    for number, row in enumerate(rows, 1):
        yield Record(row, f"{where}, row {number}", 0)


READERS: dict[str, Reader] = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


def decode_text(data: bytes | bytearray, path: Path, first_line: int) -> str:
    """`first_line`: number of the first line of `data`, for errors; a byte order mark before line 1 is dropped."""
    if first_line == 1:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason}); convert the file, "
            "for example with: iconv -f latin1 -t utf-8"
        ) from None


def _text_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(_no_such_field(field, list(record), where))
    text = record[field]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise DataError(f"{where}: '{field}' is {kind}, not text; drop this record or name another field")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can contain unpaired surrogates (\ud800), which are not characters and which no tokenizer accepts.
        half = ascii(text[error.start])
        raise DataError(f"{where}: '{field}' holds {half}, half of a surrogate pair; remove it") from None
    return text


def _no_such_field(field: str, names: list[str], where: str) -> str:
    what = f"{where}: no field '{field}'; there are: {', '.join(names) or 'none'}. Name the one that holds the text"
    return f"{what}, or pass --chat, if these are chats"
