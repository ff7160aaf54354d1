"""Which model types of the installed transformers can be trained in segments: probes every type with a causal language
model, with its default configuration, and writes a table.

    python -m benchmarks.huggingface_types benchmarks/results/huggingface_types.md
    python -m benchmarks.huggingface_types table.md --types llama qwen3

Results are kept on this machine as those of `thinpipe probe`: stop it at any time and start it again.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from thinpipe.models.hf.hollow import quiet
from thinpipe.models.hf.probe import CHECKS, ProbeResult
from thinpipe.models.hf.probe_cache import probed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--types", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    arguments = parser.parse_args()
    rows = []
    for model_type in arguments.types:
        started = time.monotonic()
        rows.append((model_type, probe_type(model_type)))
        print(f"{model_type}: {rows[-1][1].refusal or 'passes'} ({time.monotonic() - started:.1f} s)", flush=True)
    arguments.output.write_text(table(rows), encoding="utf-8")


def probe_type(model_type: str) -> ProbeResult:
    """Result for a type's default configuration."""
    with quiet():
        return probed(CONFIG_MAPPING[model_type]().to_dict())


def table(rows: list[tuple[str, ProbeResult]]) -> str:
    """Markdown: what passes with what else works, then what is refused with its reason."""
    optional = [name for name, (is_required, _) in CHECKS.items() if not is_required]
    passing = [(name, result) for name, result in rows if result.refusal is None]
    lines = [
        "# Model types in segments",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, default configurations, shrunken. "
        f"{len(passing)} of {len(rows)} types: losses and every gradient equal bit for bit.",
        "",
        f"| type | {' | '.join(optional)} |",
        f"|---|{'---|' * len(optional)}",
        *(
            f"| {name} | {' | '.join('yes' if result.works(each) else 'no' for each in optional)} |"
            for name, result in passing
        ),
        "",
        "| refused | why |",
        "|---|---|",
        *(f"| {name} | {result.refusal} |" for name, result in rows if result.refusal is not None),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
