"""The other task: dialogues in which somebody asks for sums, sorted words and what short programs print.

They are made from a seed and tokenised with the tokenizer of the base. Books have none of it: the tuned model has to
learn a form that it never saw, and answers that follow from the question.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from thinpipe.data import ShardWriter, Tokenizer, Tokens, has_tokens

NAMES = ("Ann", "Ben", "Cleo", "Dov", "Eva", "Finn", "Gus", "Hana")
WORDS = ("apple", "bread", "candle", "door", "egg", "fire", "garden", "hat", "island", "jar", "key", "lamp", "moon")
TURNS = (2, 5)
"""Fewest and most questions of a dialogue."""


def sums(random_numbers: random.Random) -> tuple[str, str]:
    first, second = random_numbers.randrange(2, 100), random_numbers.randrange(2, 100)
    word, result = random_numbers.choice((("plus", first + second), ("minus", first - second)))
    return f"What is {first} {word} {second}?", f"{first} {word} {second} is {result}."


def sorting(random_numbers: random.Random) -> tuple[str, str]:
    words = random_numbers.sample(WORDS, random_numbers.randrange(3, 6))
    return f"Sort these words: {', '.join(words)}.", f"Sorted: {', '.join(sorted(words))}."


def programs(random_numbers: random.Random) -> tuple[str, str]:
    name, value, factor = (
        random_numbers.choice("abcxyz"),
        random_numbers.randrange(2, 10),
        random_numbers.randrange(2, 5),
    )
    lines = f"{name} = {value}\nfor i in range({factor}):\n    print({name} * i)"
    return f"What does this print?\n{lines}", "It prints " + ", ".join(str(value * i) for i in range(factor)) + "."


def memory(random_numbers: random.Random) -> tuple[str, str]:
    who, what = random_numbers.sample(NAMES, 2), random_numbers.sample(WORDS, 2)
    facts = f"{who[0]} has the {what[0]} and {who[1]} has the {what[1]}."
    asked = random_numbers.randrange(2)
    return f"{facts} Who has the {what[asked]}?", f"{who[asked]} has the {what[asked]}."


QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (sums, sorting, programs, memory)


def dialogues(seed: int) -> Iterator[str]:
    """Without end."""
    random_numbers = random.Random(seed)
    while True:
        turns = (random_numbers.choice(QUESTIONS)(random_numbers) for _ in range(random_numbers.randint(*TURNS)))
        yield "".join(f"<user>\n{question}\n<assistant>\n{answer}\n" for question, answer in turns)


def make_task(source: Path, folder: Path, *, seq_len: int, samples: int, validation_samples: int) -> None:
    """Writes FOLDER/train and FOLDER/validation with at least these numbers of samples.

    Their tokens are those of the tokenizer of `source`. `train` comes last: where it is, both are whole.
    """
    if has_tokens(folder / "train"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    vocabulary = Tokens(source / "train").manifest.vocabulary
    tokenizer = Tokenizer.load(source / "tokenizer")
    for seed, (side, count) in enumerate((("validation", validation_samples), ("train", samples))):
        with ShardWriter(folder / side, vocabulary, source="dialogues") as writer:
            missing = count * seq_len + 1
            for text in dialogues(seed):
                (ids,) = tokenizer.encode_batch([text])
                writer.add(ids, text_nbytes=len(text.encode()))
                missing -= len(ids) + 1  # the token that closes a document
                if missing <= 0:
                    break
            writer.finish()
