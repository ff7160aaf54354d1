"""Every way to cross a boundary, in two processes: the settings of each golden case, and the pair that runs them.

`python -m tests.golden.boundaries FOLDER` is one of the two. Both run one case after the other with the real trainer,
because starting a process costs seconds.
"""

import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.golden.data import write_tokens
from tests.golden.environment import PATIENCE, pinned_environment
from tests.golden.observe import observe_run
from tests.pipeline import cases as contract
from tests.transport.processes import free_port, group_environment
from thinpipe.config.link import LinkConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, from_table
from thinpipe.training.trainer import Trainer
from thinpipe.transport.gloo_group import open_group

TOPK = {"kind": "topk", "keep": 0.3}
QUANTISE = {"kind": "quantise", "bits": 4, "tile": 16}
OUTLIERS = {"rotate": True, "whole_channels": 3, "whole_tokens": 1}
LOWRANK = {"kind": "lowrank", "rank": 4}
KEEL = {
    "width": 6,
    "token_prior_rank": 4,
    "token_prior_window": 3,
    "embedding_rank": 5,
    "bigram_rows": 32,
    "bigram_rank": 4,
}
FORMATS = ("fp32", "bf16", "int8", "int4")
BOUNDARIES: dict[str, dict] = {
    **{f"subspace in {name}": {"forward": name, "backward": name, "method": "subspace"} for name in FORMATS},
    **{f"dense in {name}": {"forward": name, "backward": name, "method": "none"} for name in FORMATS},
    "topk": {"states": {"kind": "topk", "keep": 0.1}, "gradients": {**TOPK, "per": "token", "format": "int8"}},
    "topk with the mask of the states": {"states": TOPK, "gradients": {"kind": "topk", "reuse_mask": True}},
    "topk but at inference": {"method": "subspace", "states": TOPK, "at_inference": False},
    "quantise": {
        "states": {"kind": "quantise", "bits": 3},
        "gradients": {"kind": "quantise", "bits": 5, "per": "token"},
    },
    "quantise after a rotation": {"states": {**QUANTISE, "rotate": True}, "gradients": {**QUANTISE, "rotate": True}},
    "quantise but outliers": {
        "states": {"kind": "quantise", "bits": 8, "per": "token", **OUTLIERS},
        "gradients": {**QUANTISE, **OUTLIERS, "whole_tokens": 2, "feedback": "ef"},
    },
    "lowrank": {"states": LOWRANK, "gradients": {**LOWRANK, "format": "fp32"}},
    "ef": {"method": "subspace", "states": {**TOPK, "feedback": "ef"}, "gradients": {**QUANTISE, "feedback": "ef"}},
    "ef21": {"states": {**QUANTISE, "feedback": "ef21"}, "gradients": {**TOPK, "feedback": "ef21"}},
    "ef21 of lowrank": {"states": {**LOWRANK, "feedback": "ef21"}, "gradients": {**LOWRANK, "feedback": "ef"}},
    "ef with the mask of the states": {
        "states": {**TOPK, "feedback": "ef21"},
        "gradients": {"kind": "topk", "reuse_mask": True, "feedback": "ef"},
    },
    "aqsgd": {"states": {**QUANTISE, "bits": 2, "feedback": "aqsgd"}, "gradients": QUANTISE},
}
"""[boundary] of cases by name."""
_KINDS = {
    each["kind"] for table in BOUNDARIES.values() for each in (table.get("states"), table.get("gradients")) if each
}
BOUNDARIES |= {
    case.name: tomllib.loads(dump_toml(case.boundary))
    for case in contract.CASES
    if {case.boundary.states.kind, case.boundary.gradients.kind} - _KINDS - {"none"}
}
"""A kind of compression that came later has the settings of its case in the contract test."""
PROJECTIONS: dict[str, tuple[dict, dict]] = {
    "keel in int4": (KEEL, {"forward": "int4", "backward": "int4"}),
    "learned neck": ({"kind": "learned", "width": 6, "token_prior_rank": 4}, {}),
    "bottleneck": ({"kind": "bottleneck", "width": 6}, {"forward": "bf16", "backward": "bf16"}),
}
"""[model.projection] and [boundary] of cases by name."""
CASES = {
    **{f"boundary: {name}": ({}, boundary) for name, boundary in BOUNDARIES.items()},
    **{f"boundary: {name}": settings for name, settings in PROJECTIONS.items()},
}


def settings_of(case: str, folder: Path) -> dict:
    """A run of six steps that sees each of its eight samples three times, with two changes of basis if it has one."""
    projection, boundary = CASES[case]
    subspace = {"subspace": {"width": 6}} if boundary.get("method") == "subspace" else {}
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 48, "max_seq_len": 12}
    return {
        "job": {"dump_folder": str(folder / case_folder(case))},
        "data": {"path": str(folder / "tokens")},
        "model": {"preset": "llama-tiny", **sizes, "boundaries": [1], "projection": projection, **subspace},
        "training": {"steps": 6, "global_batch_size": 4, "seq_len": 12},
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1},
        "lr_scheduler": {"warmup_steps": 1},
        "basis": {"interval": 3},
        "validation": {"freq": 6, "steps": 1},
        "boundary": boundary,
    }


def case_folder(case: str) -> str:
    return f"run{list(CASES).index(case)}"


def run_pair(folder: Path) -> dict[str, dict]:
    """All cases, in two processes joined by gloo."""
    write_tokens(folder / "tokens", train=8 * 12 + 1, validation=8 * 12 + 1)
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.golden.boundaries", str(folder)],
            env=pinned_environment(**group_environment(rank, 2, port=port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=PATIENCE)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        raise RuntimeError("\n".join(text[-3000:] for text in printed))
    return {case: observe_run(folder / case_folder(case)) for case in CASES}


def main(folder: Path) -> None:
    group = open_group(LinkConfig(), timeout=timedelta(seconds=PATIENCE))
    for case in CASES:
        Trainer(from_table(settings_of(case, folder), RunConfig, where=case), group).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
