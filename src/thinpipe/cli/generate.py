"""`thinpipe generate`: a trained model continues a text, shown as it comes."""

import sys

from thinpipe.checkpoint import find_checkpoint, load_model, run_folder_of
from thinpipe.cli.settings import GenerateConfig
from thinpipe.data import Tokenizer
from thinpipe.models.generate import generate
from thinpipe.train.engine import choose_device


def run(config: GenerateConfig) -> int:
    checkpoint = find_checkpoint(config.run)
    tokenizer = Tokenizer.load(run_folder_of(checkpoint) / "tokenizer")
    model = load_model(checkpoint, choose_device(config.device))
    prompt_ids = [int(token) for token in tokenizer.encode_batch([config.prompt])[0]]
    sys.stdout.write(config.prompt)
    end_of_text_id = tokenizer.vocabulary.end_of_text_id
    shown, new_ids = "", []
    for token in generate(
        model,
        prompt_ids,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        stop_id=end_of_text_id,
    ):
        if token == end_of_text_id:
            break
        new_ids.append(token)
        text = tokenizer.decode(new_ids)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()
    return 0
