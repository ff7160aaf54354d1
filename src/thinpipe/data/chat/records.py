"""Readers of chats from JSON-lines, JSON and Parquet files and from Hugging Face data sets: each record as a document
whose text is the record as JSON. What its fields mean is read in `data.chat.formats`."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from thinpipe.core.errors import DataError
from thinpipe.data.readers import (
    Document,
    Reader,
    Record,
    decode_text,
    huggingface_records,
    jsonl_records,
    parquet_records,
)

_HINT = 'write {"messages": [{"role": "user", "content": "..."}, ...]}'


def read_jsonl_chats(path: Path, _field: str) -> Iterator[Document]:
    yield from _documents(jsonl_records(path, _HINT))


def read_json_chats(path: Path, _field: str) -> Iterator[Document]:
    """One array of objects, as many data sets of instructions are published."""
    data = path.read_bytes()
    try:
        records = json.loads(decode_text(data, path, 1))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg}); write an array of objects") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: not an array of objects; write one, or one object per line in a .jsonl file")
    for number, fields in enumerate(records, 1):
        yield _document(Record(fields, f"{path}, entry {number}", len(data) // len(records)))


def read_parquet_chats(path: Path, _field: str) -> Iterator[Document]:
    yield from _documents(parquet_records(path, None))


def read_huggingface_chats(name: str, config: str | None, split: str) -> Iterator[Document]:
    yield from _documents(huggingface_records(name, config, split))


def _documents(records: Iterable[Record]) -> Iterator[Document]:
    return (_document(record) for record in records)


def _document(record: Record) -> Document:
    text = json.dumps(record.fields, default=str)  # tables may have columns of dates, which no chat is made of
    return Document(text, record.read_nbytes or len(text), record.where)


CHAT_READERS: Mapping[str, Reader] = {
    ".jsonl": read_jsonl_chats,
    ".json": read_json_chats,
    ".parquet": read_parquet_chats,
}
