"""examples/*.ipynb, from the first cell to the last, in a kernel of their own."""

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.programs import Program, hub_arguments, invites_of
from tests.readme.pages import ROOT
from thinpipe.config.toml import dump_toml

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LIMIT_SECONDS = 300


def execute(name, folder, **values):
    """Returns all that was printed. `values` take the place of those that the notebook gives."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    for cell in notebook.cells:
        lines = cell.source.splitlines()
        cell.source = "\n".join(
            f"{key} = {values[key]!r}" if (key := line.partition(" = ")[0]) in values else line for line in lines
        )
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs), outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]
    assert path.name in (ROOT / "docs/README.md").read_text()


@pytest.mark.long
@pytest.mark.quiet
@pytest.mark.timeout(1800)
def test_training_and_tuning_take_five_minutes(tmp_path):
    began = time.monotonic()
    printed, outputs = execute("train_and_tune.ipynb", tmp_path)
    seconds = time.monotonic() - began
    assert "step 250: loss" in printed
    assert "Alice looked at the Queen" in printed
    assert "The river" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)
    print(f"took {seconds:.0f} s")
    assert seconds < LIMIT_SECONDS


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_notebook_joins_a_run(run_config, programs, tmp_path):
    folder = run_config.job.dump_folder
    file = folder.with_suffix(".toml")
    file.write_text(dump_toml(run_config))
    hub = programs("hub", *hub_arguments(file, 2, "--hub.up", "1gbps", "--hub.down", "1gbps"))
    mine, other = invites_of(hub)
    friend = programs("friend", "join", other, "--folder", tmp_path / "friend", "--name", "friend")
    assert isinstance(friend, Program)
    printed, _ = execute("join_a_run.ipynb", tmp_path, INVITE=mine)
    assert "joined run" in printed
    assert [hub.finish(), friend.finish()] == [0, 0], hub.printed
    assert (Path(tmp_path) / "joined/notebook").is_dir()
