"""`thinpipe generate`: continues a prompt with a trained model, streaming the text."""

import sys
from collections.abc import Iterator

from thinpipe.checkpoint import find_checkpoint, load_model, run_folder_of
from thinpipe.config.commands import GenerateConfig
from thinpipe.data import Tokenizer
from thinpipe.models.generate import generate
from thinpipe.training.engine import choose_device


def run(config: GenerateConfig) -> int:
    pieces = continuation(config)
    sys.stdout.write(config.prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0


def continuation(config: GenerateConfig) -> Iterator[str]:
    """Generated text after the prompt, in pieces of whole characters."""
    checkpoint = find_checkpoint(config.run)
    tokenizer = Tokenizer.load(run_folder_of(checkpoint) / "tokenizer")
    model = load_model(checkpoint, choose_device(config.device))
    prompt_ids = [int(token) for token in tokenizer.encode_batch([config.prompt])[0]]
    end_of_text_id = tokenizer.vocabulary.end_of_text_id
    tokens = generate(
        model,
        prompt_ids,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        stop_id=end_of_text_id,
    )

    def pieces() -> Iterator[str]:
        shown, new_ids = "", list[int]()
        for token in tokens:
            if token == end_of_text_id:
                return
            new_ids.append(token)
            text = tokenizer.decode(new_ids)
            if not text.endswith("\ufffd"):  # incomplete UTF-8 sequence: wait for the rest
                yield text[len(shown) :]
                shown = text

    return pieces()
