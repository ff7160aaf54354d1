"""`thinpipe tokenize`: converts text to a folder of tokens for training."""

from thinpipe.data import Manifest, PrepareConfig, prepare, progress_bar


def run(config: PrepareConfig) -> int:
    prepared = prepare(config, progress_bar)
    print(f"{config.output}: vocabulary of {prepared.train.vocabulary.size:,}")
    for split, manifest in (("train", prepared.train), ("validation", prepared.validation)):
        if manifest is not None:
            print(f"  {split}: {_describe(manifest)}")
    if prepared.validation is None:
        print("  no validation text: give --validation-sources or --validation-fraction to follow a run's progress")
    return 0


def _describe(manifest: Manifest) -> str:
    return (
        f"{manifest.tokens:,} tokens from {manifest.documents:,} documents, "
        f"{manifest.text_bytes_per_token:.2f} bytes a token"
    )
