"""The program of `data.encoding_processes`: reads a job and then blocks of text from its input, and writes their tokens
to its output, until the input ends."""

import os
import signal
import sys
import tomllib
from pathlib import Path

import msgspec

from thinpipe.config.data import TokenizeConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import DataError
from thinpipe.data.blocks import Block, BlockEncoder, ChatBlockEncoder, TextBlockEncoder
from thinpipe.data.chat.encoding import ChatEncoder
from thinpipe.data.chat.template import ChatTemplate
from thinpipe.data.encoding_processes import EncodingAnswer, EncodingJob, read_frame, write_frame
from thinpipe.data.tokenizer import Tokenizer


def _encoder(job: EncodingJob) -> BlockEncoder:
    config = from_table(tomllib.loads(job.config), TokenizeConfig, where="job")
    tokenizer = Tokenizer.load(Path(job.tokenizer), config.end_of_text)
    if not config.chat:
        return TextBlockEncoder(tokenizer)
    assert config.tokenizer is not None
    return ChatBlockEncoder(ChatEncoder(config, ChatTemplate(config.tokenizer), tokenizer.vocabulary.size))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the program that sends the blocks
    source, target = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    first = read_frame(source)
    if first is None:
        return
    encoder = _encoder(msgspec.msgpack.decode(first, type=EncodingJob))
    while (data := read_frame(source)) is not None:
        try:
            answer = EncodingAnswer(encoded=encoder.encode(msgspec.msgpack.decode(data, type=Block)))
        except DataError as error:
            answer = EncodingAnswer(error=str(error))
        try:
            write_frame(target, msgspec.msgpack.encode(answer))
        except OSError:  # whoever sent the block has ended
            return


if __name__ == "__main__":
    main()
