"""`thinpipe generate --validation-chats`: answers to held-out chats of the base and of the tuned one, side by side."""

import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinpipe.checkpoint import Checkpoint, find_checkpoint, load_base, load_model, run_folder_of
from thinpipe.cli.chat_sample import printable
from thinpipe.config.commands import GenerateConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import UserError
from thinpipe.data import HeldOutChat, Tokenizer, Tokens, has_tokens, held_out_chats
from thinpipe.device.choice import choose_device
from thinpipe.models import Model
from thinpipe.models.generate import generate

if TYPE_CHECKING:
    from thinpipe.models.hf.decoder import HuggingFaceModel

AnyModel: TypeAlias = "Model | HuggingFaceModel"


def compare_answers(config: GenerateConfig) -> int:
    checkpoint = find_checkpoint(config.run)
    chats = held_out_chats(_validation(config, checkpoint), config.validation_chats)
    tokenizer = Tokenizer.load(run_folder_of(checkpoint) / "tokenizer")
    device = choose_device(config.device)
    before = answers(load_base(checkpoint, device), chats, tokenizer, config)
    after = answers(load_model(checkpoint, device), chats, tokenizer, config)
    console = Console(highlight=False, markup=False)
    for number, (chat, base, tuned) in enumerate(zip(chats, before, after, strict=True), start=1):
        console.print(f"chat {number} of {len(chats)}:\n{_shown(chat.prompt, tokenizer, console)}", soft_wrap=True)
        table = Table(box=SIMPLE, show_edge=False, expand=True)
        for name in ("the base", "tuned", "in the data"):
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*(_shown(ids, tokenizer, console) for ids in (base, tuned, chat.answer)))
        console.print(table)
    return 0


def _validation(config: GenerateConfig, checkpoint: Checkpoint) -> Tokens:
    trained = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(checkpoint.path))
    folder = (config.data or trained.data.only_folder) / "validation"
    if not has_tokens(folder):
        raise UserError(
            f"{folder} has no tokens: pass --data FOLDER, a folder made by `thinpipe tokenize --chat` with chats for "
            "validation"
        )
    return Tokens(folder)


def answers(
    model: AnyModel, chats: Sequence[HeldOutChat], tokenizer: Tokenizer, config: GenerateConfig
) -> list[list[int]]:
    """Token ids of the model's answers, with those that end them."""
    return [_answer(model, chat, tokenizer, config) for chat in chats]


def _answer(model: AnyModel, chat: HeldOutChat, tokenizer: Tokenizer, config: GenerateConfig) -> list[int]:
    ends = {tokenizer.vocabulary.end_of_text_id, *tokenizer.special_ids.intersection(chat.answer[-1:])}
    answer = list[int]()
    for token in generate(
        model,
        chat.prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    ):
        answer.append(token)
        if token in ends:
            break
    return answer


def _shown(ids: Sequence[int], tokenizer: Tokenizer, console: Console) -> str:
    return printable(tokenizer.decode(ids), console.encoding)
