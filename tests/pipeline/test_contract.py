"""N processes give the bits of one: every method, number format and schedule, through changes of basis."""

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache

import pytest

from tests.pipeline import cases
from tests.pipeline.cases import CASES, cases_for, run_case, segments_for
from tests.reference.language import SyntheticLanguage
from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import hub_services
from tests.transport.processes import start
from thinpipe.boundary.registry import COMPRESSORS, FEEDBACKS
from thinpipe.config.model import SubspaceConfig
from thinpipe.core.errors import UserError
from thinpipe.pipeline.p2p import p2p_tag
from thinpipe.pipeline.pipeline_runner import SCHEDULES
from thinpipe.pipeline.placement import place
from thinpipe.training.engine import Engine


def run_processes(schedule, processes, output, *, few):
    """Every process's results; a failure shows the end of each one's output."""
    workers = start(processes, "tests.pipeline.worker", schedule, output, "few" if few else "all")
    printed = [worker.communicate(timeout=800)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * processes, "\n".join(text[-3000:] for text in printed)
    return [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(processes)]


@cache
def twin(segments, few):
    """What one process comes to; the schedule is no matter there."""
    return {case.name: run_case(case, segments, "GPipe") for case in cases_for("GPipe", few=few)}


def messages_sent(parts):
    """(tag, bytes) -> how many, as the transport was given them by all processes; the exchange of norms apart."""
    first = p2p_tag(0, forward=True)
    return {(tag, nbytes): count for part in parts for tag, nbytes, count in part["sent"] if tag >= first}


def messages_stated(lengths, case, schedule, processes):
    """One message for every micro-batch, boundary between processes and direction, of the length the method states."""
    microbatches = cases.batch_size(len(lengths) + 1)
    forward_only = 1 + (2 * 2 if case.in_subspace else 0)  # validation, and twice at each change of basis
    home = {
        segment: rank
        for rank in range(processes)
        for segment in place(schedule, processes, len(lengths) + 1).segments_of(rank)
    }
    stated = Counter()
    for boundary, (forward, backward, at_inference) in enumerate(lengths):
        if home[boundary] != home[boundary + 1]:
            stated[p2p_tag(boundary, forward=True), forward] += microbatches * case.steps
            stated[p2p_tag(boundary, forward=True), at_inference] += microbatches * forward_only
            stated[p2p_tag(boundary, forward=False), backward] += microbatches * case.steps
    return stated


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_equal_the_twin_bit_for_bit(schedule, tmp_path):
    """Every case with one schedule, every schedule with a few cases."""
    compare_with_twin(schedule, 2, tmp_path, few=schedule != "1F1B")


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_case_and_schedule_equals_the_twin_bit_for_bit(schedule, processes, tmp_path):
    compare_with_twin(schedule, processes, tmp_path)


@pytest.fixture
def on_nats(tmp_path, monkeypatch):
    """Makes a broker for so many processes, which they find in their environment."""
    with ExitStack() as stack:

        def begin(processes):
            names = tuple(f"p{rank}" for rank in range(processes))
            running = stack.enter_context(running_broker(tmp_path, names))
            stack.enter_context(hub_services(running))
            told = {
                "url": running.url,
                "fingerprint": running.fingerprint,
                "credentials": {name: asdict(each) for name, each in running.credentials.items()},
            }
            monkeypatch.setenv("BROKER", json.dumps(told))

        yield begin


def test_two_processes_on_nats_equal_the_twin_bit_for_bit(on_nats, tmp_path):
    on_nats(2)
    compare_with_twin("1F1B", 2, tmp_path, few=True)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_case_and_schedule_on_nats_equals_the_twin_bit_for_bit(schedule, processes, on_nats, tmp_path):
    on_nats(processes)
    compare_with_twin(schedule, processes, tmp_path)


def compare_with_twin(schedule, processes, tmp_path, *, few=False):
    expected = twin(segments_for(schedule, processes), few)
    reports = run_processes(schedule, processes, tmp_path / "result", few=few)
    assert [report["unpickled"] for report in reports] == [[]] * processes
    for case in cases_for(schedule, few=few):
        want = json.loads(json.dumps(expected[case.name]))
        parts = [report["results"][case.name] for report in reports]
        for part in parts:  # every process knows the loss and the norm
            assert (part["seen"], part["validation"]) == (want["seen"], want["validation"]), case.name
            assert part["basis"] == want["basis"] == (2 if case.in_subspace else None)
        for what in ("gradients", "weights", "moments", "codec_states"):
            together = {}
            for part in parts:
                together |= part[what]
            assert together == want[what], f"{what} of {case.name}"
        assert messages_sent(parts) == messages_stated(want["stated"], case, schedule, processes), case.name
    # They are different functions, so equality above is not for want of anything happening.
    assert len({json.dumps(result["seen"]) for result in expected.values()}) == len(expected)


def test_every_compressor_and_feedback_has_a_case():
    boundaries = [case.boundary for case in CASES]
    for direction in ("states", "gradients"):
        used = [getattr(boundary, direction) for boundary in boundaries]
        assert {compression.kind for compression in used} == {"none", *COMPRESSORS}
        assert {compression.feedback for compression in used} >= {*FEEDBACKS} - {
            "aqsgd" if direction == "gradients" else ""
        }


def test_exact_methods_do_not_care_where_the_boundaries_are():
    """fp32 states cross bit for bit, so moving, adding or removing cuts changes nothing but names of segments."""
    language = SyntheticLanguage(cases.VOCABULARY, seed=1)
    for method in ("none", "subspace"):
        base = cases.config_of(cases.formatted(method, "fp32", "fp32"), 4, "GPipe")
        weights = []
        for boundaries in ((1, 2, 3), (2,), (1, 3)):
            subspace = replace(base.model.subspace, free_last=False) if method == "subspace" else SubspaceConfig()
            config = replace(base, model=replace(base.model, boundaries=boundaries, subspace=subspace))
            engine = Engine(config, config.model.resolve(cases.VOCABULARY))
            for step in range(6):
                engine.step(step, language.batch(step, cases.batch_size(4), cases.TOKENS).numpy(), lr=3e-3)
            weights.append({name: cases.digest(parameter) for name, parameter in engine.parameters.items()})
        assert weights[0] == weights[1] == weights[2]


def test_pickled_metadata_of_a_neighbour_is_never_read_and_its_code_does_not_run(tmp_path):
    hostile, honest = start(2, "tests.pipeline.neighbours", tmp_path / "ran")
    printed, _ = honest.communicate(timeout=600)
    offered, _ = hostile.communicate()
    assert (hostile.returncode, honest.returncode) == (1, 1)
    assert "send_object_list" in offered
    assert "could not receive micro-batch 0 of states from stage 0" in printed
    assert not (tmp_path / "ran").exists()


def test_places():
    assert place("1F1B", 3, 3).processes == [[0], [1], [2]]
    assert place("1F1B", 2, 5).stages == [range(3), range(3, 5)]
    assert place("Interleaved1F1B", 2, 4).processes == [[0, 2], [1, 3]]
    assert place("ZBVZeroBubble", 2, 4).processes == [[0, 3], [1, 2]]
    assert place("ZBVZeroBubble", 2, 8).segments_of(1) == [2, 3, 4, 5]
    assert place("ZBVZeroBubble", 1, 3).stages == [range(3)]
    with pytest.raises(UserError, match=r"needs a model of at least 4 segments, and this model has 3"):
        place("ZBVZeroBubble", 2, 3)
