"""`thinpipe tokenize`: converts text to a folder of tokens for training."""

from thinpipe.data import Manifest, TokenizeConfig, prepare, progress_bar


def run(config: TokenizeConfig) -> int:
    prepared = prepare(config, progress_bar)
    print(f"{config.output}: vocabulary of {prepared.train.vocabulary.size:,}")
    for split, manifest in (("train", prepared.train), ("validation", prepared.validation)):
        if manifest is not None:
            print(f"  {split}: {_describe(manifest)}")
    if prepared.validation is None:
        print("  no validation text: pass --validation-sources or --validation-fraction to have a validation loss")
    return 0


def _describe(manifest: Manifest) -> str:
    documents = "1 document" if manifest.documents == 1 else f"{manifest.documents:,} documents"
    return f"{manifest.tokens:,} tokens from {documents}, {manifest.text_bytes_per_token:.2f} bytes a token"
