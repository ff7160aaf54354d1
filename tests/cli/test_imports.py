"""torch's pipelining, and torch._dynamo with sympy that it brings, are imported only where a pipeline runs: they cost
two seconds of processor time in every process."""

import subprocess
import sys

import pytest

HEAVY = ("torch.distributed.pipelining", "torch._dynamo", "sympy")
RUN = """
[job]
dump_folder = "run"
[data]
path = "tokens"
[model]
preset = "llama-tiny"
dim = 32
n_heads = 2
n_kv_heads = 1
hidden_dim = 64
boundaries = [1, 3]
subspace = { width = 4 }
[training]
steps = 2
global_batch_size = 8
seq_len = 16
[parallelism]
pipeline_parallel_microbatch_size = 4
[lr_scheduler]
warmup_steps = 1
[basis]
interval = 1
[checkpoint]
interval = 1
[validation]
freq = 1
steps = 1
"""


def brought(program, folder):
    """Those of `HEAVY` that are imported when `program` has run, printed in the last line."""
    code = f"{program}\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules], sep=',')"
    finished = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout.splitlines()[-1].strip()


def command(*arguments):
    return f"from thinpipe.cli import main; assert main({list(arguments)}) == 0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with tokens and a run, and what its training in one process has imported."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "run.toml").write_text(RUN)
    sources = ("--sources", "sample:validation", "--validation-sources", "sample:validation")
    brought(command("tokenize", *sources, "--vocab-size", "300", "--output", "tokens"), folder)
    return folder, brought(command("train", "run.toml"), folder)


def test_training_in_one_process(trained):
    assert trained[1] == ""


@pytest.mark.parametrize("arguments", [("eval", "run", "--max-batches", "1"), ("generate", "run", "--prompt", "Alice")])
def test_a_command_that_computes(trained, arguments):
    assert brought(command(*arguments), trained[0]) == ""


def test_the_launcher_of_processes(trained):
    degree = ("--parallelism.pipeline-parallel-degree", "2", "--job.dump-folder", "run2")
    assert brought(command("train", "run.toml", *degree), trained[0]) == ""


def test_a_peer_before_it_trains(tmp_path):
    program = (
        "import thinpipe.swarm.peer.join; from thinpipe.swarm.peer.machine_probe import measure_machine; "
        "from thinpipe.config.run import RunConfig; measure_machine(RunConfig(), dim=32, heads=(2, 1, 16), seconds=0.1)"
    )
    assert brought(program, tmp_path) == ""


def test_a_pipeline_does_import_them(tmp_path):
    assert brought("import thinpipe.pipeline.pipeline_runner", tmp_path) == ",".join(HEAVY)
