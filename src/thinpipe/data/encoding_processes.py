"""Encodes blocks of text in processes of their own, a core for each, and returns them in order.

The processes are programs (`data.encoding_worker`) that read blocks from their input until it ends, as it does when
this process ends, however it ends. Starting them needs no guard in a user's script, unlike multiprocessing.
"""

import itertools
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Self

import msgspec

from thinpipe.config.data import TokenizeConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import DataError
from thinpipe.data.blocks import Block, BlockEncoder, EncodedPiece

_WORKER = "thinpipe.data.encoding_worker"
_BLOCKS_AHEAD = 2
"""Blocks for each process that are read, and encoded or not, before the first of them is written."""
_LENGTH_NBYTES = 8


class EncodingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is sent first."""

    config: str
    """`TokenizeConfig` as TOML."""
    tokenizer: str
    """Folder of the tokenizer."""


class EncodingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    encoded: list[EncodedPiece] = []
    error: str = ""
    """Message of a DataError."""


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_NBYTES, "little") + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None: the stream has ended."""
    length = stream.read(_LENGTH_NBYTES)
    if len(length) < _LENGTH_NBYTES:
        return None
    nbytes = int.from_bytes(length, "little")
    data = stream.read(nbytes)
    return data if len(data) == nbytes else None


class _Process:
    def __init__(self, job: EncodingJob) -> None:
        # Each process takes one core: the tokenizers library must not take the others.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._send(msgspec.msgpack.encode(job))

    def encode(self, block: Block) -> list[EncodedPiece]:
        self._send(msgspec.msgpack.encode(block))
        data = read_frame(self._output)
        if data is None:
            raise self._ended()
        answer = msgspec.msgpack.decode(data, type=EncodingAnswer)
        if answer.error:
            raise DataError(answer.error)
        return answer.encoded

    def _send(self, data: bytes) -> None:
        try:
            write_frame(self._input, data)
        except OSError:
            raise self._ended() from None

    def _ended(self) -> DataError:
        return DataError(
            f"a process that tokenizes has ended (exit code {self._process.wait()}): the same command goes on from "
            "here; with fewer --workers it takes less memory"
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        with suppress(OSError):  # what was not sent yet has nobody to read it
            self._input.close()


class EncodingProcesses:
    """At most `count` processes, started when there is work for them, and killed at the end of the `with` block."""

    def __init__(self, config: TokenizeConfig, tokenizer: Path, count: int) -> None:
        self._job = EncodingJob(config=dump_toml(config), tokenizer=str(tokenizer))
        self._count, self._started = count, list[_Process]()
        self._idle = SimpleQueue[_Process | None]()
        for _ in range(count):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(count)

    def encode_in_order(
        self, blocks: Iterator[Block], here: BlockEncoder
    ) -> Iterator[tuple[Block, list[EncodedPiece]]]:
        """All blocks, encoded. `here` encodes in this process, where there is a single block. Raises DataError."""
        first = list(itertools.islice(blocks, 2))
        if len(first) < 2:
            yield from ((block, here.encode(block)) for block in first)
            return
        ahead = deque(map(self._submit, first))
        for block in blocks:
            if len(ahead) == _BLOCKS_AHEAD * self._count:
                yield _result(ahead.popleft())
            ahead.append(self._submit(block))
        while ahead:
            yield _result(ahead.popleft())

    def _submit(self, block: Block) -> tuple[Block, Future[list[EncodedPiece]]]:
        return block, self._threads.submit(self._encode, block)

    def _encode(self, block: Block) -> list[EncodedPiece]:
        process = self._idle.get()
        if process is None:
            process = _Process(self._job)
            self._started.append(process)
        try:
            return process.encode(block)
        finally:
            self._idle.put(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.kill()


def _result(pair: tuple[Block, Future[list[EncodedPiece]]]) -> tuple[Block, list[EncodedPiece]]:
    block, encoded = pair
    return block, encoded.result()


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS and Windows have none
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
