"""thinpipe in a notebook: text to tokens, a run with progress, its losses, text from the model.

python examples/notebook.py [FOLDER] [STEPS]      with more steps, the run goes on where it stopped
"""

import sys
from pathlib import Path

import thinpipe

folder, steps = "runs/notebook", "200"
if __name__ == "__main__" and "ipykernel" not in sys.modules:  # in a notebook the arguments are the kernel's
    folder, steps = (*sys.argv[1:], *(folder, steps)[len(sys.argv) - 1 :])
tokens = Path(folder) / "tokens"
if not tokens.exists():
    thinpipe.tokenize("sample:train", tokens, validation_sources=["sample:validation"], vocab_size=2048)
run = thinpipe.train(
    thinpipe.RunConfig(),
    quiet=True,
    callbacks=[lambda event: print(f"step {event.step}: {type(event).__name__}")],
    job={"dump_folder": Path(folder) / "run"},
    data={"path": tokens},
    model={"preset": "llama-tiny", "boundaries": [1, 2, 3], "subspace": {"width": 16}},
    training={"steps": int(steps), "global_batch_size": 8},
    optimizer={"lr": 3e-3},
    lr_scheduler={"warmup_steps": int(steps) // 10},
    boundary={"forward": "bf16", "backward": "int8"},
)
print(f"{run.stop_reason}: {len(run.losses().steps)} steps, validation loss {run.validation_losses().losses[-1]:.3f}")
print(thinpipe.load(run.checkpoint()).generate("Alice looked at the Queen", max_new_tokens=40))
