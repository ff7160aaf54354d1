"""`thinpipe tokenize`: converts text or chats to a folder of tokens for training."""

from thinpipe.cli.chat_sample import describe_chats, show_chat
from thinpipe.core.units import format_bytes
from thinpipe.data import Manifest, TokenizeConfig, prepare, progress_bar
from thinpipe.data.sources import Split


def run(config: TokenizeConfig) -> int:
    prepared = prepare(config, progress_bar, show_chat)
    if prepared.resumed_nbytes:
        print(f"went on after {format_bytes(prepared.resumed_nbytes)} of text that were tokenized before")
    print(f"{config.output}: vocabulary of {prepared.train.vocabulary.size:,}")
    sides: tuple[tuple[Split, Manifest | None], ...] = (
        ("train", prepared.train),
        ("validation", prepared.validation),
    )
    for side, manifest in sides:
        if manifest is not None and config.chat:
            first, *others = describe_chats(prepared.chats[side])
            print("\n".join([f"  {side}: {first}", *(f"    {line}" for line in others)]))
        elif manifest is not None:
            print(f"  {side}: {_describe(manifest)}")
    if prepared.validation is None:
        print("  no validation text: pass --validation-sources or --validation-fraction to have a validation loss")
    return 0


def _describe(manifest: Manifest) -> str:
    documents = "1 document" if manifest.documents == 1 else f"{manifest.documents:,} documents"
    return f"{manifest.tokens:,} tokens from {documents}, {manifest.text_bytes_per_token:.2f} bytes a token"
