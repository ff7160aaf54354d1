"""`thinpipe generate`: continues a prompt with a trained model, streaming the text; or compares its answers."""

import sys

from thinpipe.api.model import load
from thinpipe.config.commands import GenerateConfig


def run(config: GenerateConfig) -> int:
    if config.validation_chats:
        from thinpipe.cli.compare_answers import compare_answers

        return compare_answers(config)
    pieces = load(config.run, device=config.device).stream(
        config.prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    sys.stdout.write(config.prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0
