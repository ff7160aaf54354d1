"""`thinpipe eval`: validation loss, perplexity and bits per byte of a checkpoint."""

import json
import logging
import math
import tomllib

import torch

from thinpipe.checkpoint import Checkpoint, find_checkpoint, load_model, run_folder_of
from thinpipe.config.commands import EvalConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import UserError
from thinpipe.data import EvenlySpacedBatches, Tokenizer, Tokens, has_tokens, sequential_batches
from thinpipe.device.choice import choose_device
from thinpipe.training.mean_loss import mean_loss

_LOG = logging.getLogger(__name__)


def run(config: EvalConfig) -> int:
    checkpoint = find_checkpoint(config.run)
    device = choose_device(config.device)
    model = load_model(checkpoint, device)
    trained = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(checkpoint.path))
    folder = (config.data or trained.data.only_folder) / "validation"
    if not has_tokens(folder):
        raise UserError(
            f"{folder} has no tokens: pass --data FOLDER, a folder made by `thinpipe tokenize` with validation text"
        )
    tokens = Tokens(folder)
    seq_len = config.seq_len or trained.training.seq_len
    if model.config.max_seq_len is not None and seq_len > model.config.max_seq_len:
        raise UserError(f"--seq-len {seq_len} is above the model's max_seq_len {model.config.max_seq_len}: lower it")
    refuse_other_tokenizer(tokens, checkpoint)
    batch_size = config.batch_size
    batches = (
        EvenlySpacedBatches(tokens, seq_len=seq_len, batch_size=batch_size, count=config.max_batches)
        if config.max_batches
        else (ids for ids, _ in sequential_batches(tokens, seq_len=seq_len, batch_size=batch_size))
    )
    is_chat = tokens.manifest.is_chat
    loss, count = mean_loss(model, batches, device, chats=is_chat)
    result = {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.manifest.step,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": None if is_chat else tokens.manifest.bits_per_byte(loss),
        "tokens": count,
        "seq_len": seq_len,
        "torch": str(torch.__version__),
    }
    per_byte = "" if is_chat else f"   bits per byte {result['bits_per_byte']:.4f}"
    print(f"loss {loss:.4f} nats   perplexity {result['perplexity']:.2f}{per_byte}")
    print(json.dumps(result))
    return 0


def refuse_other_tokenizer(tokens: Tokens, checkpoint: Checkpoint) -> None:
    """Raises UserError if the tokens were made with another tokenizer than the checkpoint's, which would make the loss
    meaningless."""
    folder = run_folder_of(checkpoint) / "tokenizer"
    if not folder.is_dir():
        _LOG.warning(
            "%s does not exist: cannot check that %s was made with the model's tokenizer", folder, tokens.folder
        )
    elif Tokenizer.load(folder).vocabulary != tokens.manifest.vocabulary:
        raise UserError(
            f"{tokens.folder} was made with another tokenizer than the model's: tokenize with --tokenizer {folder}"
        )
