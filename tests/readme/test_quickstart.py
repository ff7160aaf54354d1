"""The commands of README and laptop page in an empty folder, with fewer steps and as they stand, and what they print;
then the result in `transformers`."""

import re
import subprocess
import sys
import time

import pytest

from tests.readme.pages import ROOT, blocks, marked
from tests.reference.exported import assert_same_in_transformers
from thinpipe.core.events import Validated, read_events

README, LAPTOP = ROOT / "README.md", ROOT / "docs/howto/laptop.md"
LIMIT_SECONDS = 300
SHORT = {"train": ["--training.steps", "40", "--lr-scheduler.warmup-steps", "10", "--validation.freq", "20"]}
TWO_STEPS = ["--training.steps", "2", "--lr-scheduler.warmup-steps", "1", "--metrics.log-freq", "1"]

NUMBER = r"[-+]?\d[\d,.]*(?:e[-+]\d+)?"


def run(command, folder):
    assert command[0] == "thinpipe"
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_quick_start(folder, more):
    """What each verb printed; `more` are arguments of verbs that the README does not have."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return {verb: run(["thinpipe", verb, *rest, *more.get(verb, [])], folder) for _, verb, *rest in QUICK_START}


QUICK_START = [*marked(README, "quick start"), *marked(README, "quick start, after")]


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick-start")
    return folder, run_quick_start(folder, SHORT)


def check_quick_start(folder, printed):
    """Returns the validation losses."""
    events = read_events(folder / "runs/quickstart/events.jsonl")
    losses = [event.loss for event in events if isinstance(event, Validated)]
    assert losses[-1] < losses[0] < 7.6  # ln 2048, what guessing costs
    assert (folder / "runs/quickstart/report/loss.png").stat().st_size > 10_000
    assert printed["generate"].startswith("Alice looked at the Queen")
    assert len(printed["generate"]) > 100
    return losses


def test_the_quick_start_runs_and_learns(quick_start):
    check_quick_start(*quick_start)


def test_a_new_settings_file_is_planned_and_trains(quick_start):
    folder, _ = quick_start
    (_, *new), (_, *train) = marked(README, "new")
    assert "tokens/s" in run(["thinpipe", *new], folder)
    smaller = ["--training.seq-len", "16", "--training.global-batch-size", "2"]
    assert "finished" in run(["thinpipe", *train, *smaller], folder)


def test_a_plan_for_this_machine_needs_no_file(quick_start):
    folder, _ = quick_start
    (command,) = marked(ROOT / "docs/howto/plan.md", "plan here")
    printed = run(command, folder)
    assert "it fits" in " ".join(printed.split())
    assert "GFLOP/s" in printed


def pattern_of(line):
    """Any numbers for the numbers of a shown line, any spaces for its spaces, anything for dots at its end, any lines
    for a line of dots."""
    if line == "...":
        return r"(?:.*\n)*"
    parts = [re.escape(part) for part in re.split(NUMBER, line.removesuffix("..."))]
    return re.sub(r"(\\ )+", r"\\s+", NUMBER.join(parts)) + (r".*\n" if line.endswith("...") else r"\n")


def assert_printed(shown, printed):
    """What a page shows is printed, from its first line to its last."""
    pattern = "".join(map(pattern_of, shown.splitlines()))
    assert re.fullmatch(pattern, f"{printed.rstrip()}\n"), f"shown:\n{shown}\nprinted:\n{printed}"


def test_the_quick_start_prints_what_the_readme_shows(quick_start):
    _, printed = quick_start
    (shown,) = (block.text for block in blocks(README) if block.mark.startswith("quick start output"))
    assert shown.startswith(printed["tokenize"]), "counts of tokens are the same everywhere"
    *training, story = shown.removeprefix(printed["tokenize"]).splitlines()
    assert_printed("\n".join(training), printed["train"])
    assert story.startswith(
        "Alice looked at the Queen"
    )  # what follows depends on the steps, `check_quick_start` reads it


@pytest.mark.parametrize(
    ("shown", "printed"),
    [("a: 1 c", "a: 1 b"), ("a: 1 c", ""), ("a", "x\na"), ("a\n...\nb", "a\nx"), ("a ...", "b a"), ("a", "a\nb")],
)
def test_other_output_than_shown_is_found(shown, printed):
    with pytest.raises(AssertionError, match="shown:"):
        assert_printed(shown, printed)


def test_numbers_and_what_dots_leave_out_may_differ():
    assert_printed("a:  1,000.5e-3 c\n...\nd ...", "a: 7 c\nx\ny\nd e")


@pytest.mark.long
@pytest.mark.quiet
def test_the_quick_start_as_it_stands_takes_less_than_five_minutes(tmp_path):
    started = time.monotonic()
    printed = run_quick_start(tmp_path, {})
    seconds = time.monotonic() - started
    print(f"the quick start took {seconds:.0f} s")
    assert seconds < LIMIT_SECONDS
    assert check_quick_start(tmp_path, printed)[-1] < 6.0


def test_the_export_opens_in_transformers_with_the_same_logits_and_text(quick_start):
    folder, _ = quick_start
    assert_same_in_transformers(folder / "exported", folder / "runs/quickstart", "Alice looked at the Queen and")
    assert "thinpipe" in (folder / "exported/README.md").read_text()


@pytest.mark.long
def test_the_slow_line_shows_what_the_readme_says(quick_start):
    """Two steps of each run are enough to see it."""
    folder, _ = quick_start
    thin, thick, report = marked(LAPTOP, "links")
    for command in (thin, thick):
        printed = run([*command, *TWO_STEPS], folder)
        assert re.search(
            r"bubble: \d+% \(slowest: process \d\)  sent: [\d.]+ MB  busiest link: [\d.]+ Mbps over", printed
        )
    thin_line, thick_line, cost, page = run(report, folder).strip().splitlines()
    lines = (thin_line, thick_line)
    sizes = {line.split()[0]: float(re.search(r"([\d,]+) bytes/token", line)[1].replace(",", "")) for line in lines}
    # 16 numbers in 2 bytes forward, in one and a scale of 2 back, and the id, against 256 numbers in 2 bytes each way.
    assert sizes == {"thin": pytest.approx(16 * 2 + 16 + 2 + 2, abs=1), "thick": pytest.approx(256 * 4 + 2, abs=1)}
    assert cost.startswith("thin against thick: training loss")
    assert "loss over time" in (folder / page).read_text()


def test_the_keel_trains_and_its_export_brings_its_code(quick_start):
    folder, _ = quick_start
    train, export = marked(README, "keel")
    assert "bubble: " in run([*train, *TWO_STEPS], folder)
    assert "trust_remote_code=True" in run(export, folder)
    assert_same_in_transformers(folder / "exported-keel", folder / "runs/keel", "Alice looked", trust=True)


def test_four_peers_and_a_hub_on_this_machine(quick_start):
    folder, _ = quick_start
    (up,) = marked(README, "friends")
    printed = run([*up, "--training.steps", "4", "--lr-scheduler.warmup-steps", "2"], folder)
    assert re.search(r"generation 1 starts from step 0: (p\d \(segment \d\)(, )?){4}; slowest part: ", printed)
    assert printed.strip().splitlines()[-1] == "finished: the trained model is in runs/friends"
