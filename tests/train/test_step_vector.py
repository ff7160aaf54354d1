"""The layout of the step's sum: every number has one place, and is read where it was written."""

from thinpipe.training.step_vector import PER_BOUNDARY_DIRECTION, PER_BOUNDARY_SENDER, PER_PROCESS, StepVector

PARTS = (*PER_BOUNDARY_SENDER, *PER_BOUNDARY_DIRECTION)
ENDS = [(0, True), (0, False), (1, True), (1, False)]


def test_every_number_has_a_place_of_its_own():
    vector = StepVector(["a", "b"], boundaries=2, processes=3)
    places = sorted(place for part in vector.parts.values() for place in range(part.start, part.stop))
    assert places == list(range(vector.size))
    assert vector.size == 2 + 1 + 1 + len(PARTS) * 4 + len(PER_PROCESS) * 3


def test_what_was_written_is_read():
    vector = StepVector(["a", "b"], boundaries=2, processes=3)
    numbers = vector.pack(
        loss=2.5,
        stops=1.0,
        gradient_norms={"b": 0.5},
        of_ends={part: {(1, True): float(index + 1)} for index, part in enumerate(PARTS)},
        of_process={part: float(index + 7) for index, part in enumerate(PER_PROCESS)},
        rank=2,
    )
    assert len(numbers) == vector.size
    assert (vector.loss(numbers), vector.stops(numbers)) == (2.5, 1.0)
    assert vector.gradient_norms(numbers) == {"a": 0.0, "b": 0.5}
    for index, part in enumerate(PARTS):
        assert vector.of_ends(part, numbers) == dict.fromkeys(ENDS, 0.0) | {(1, True): index + 1.0}
    for index, part in enumerate(PER_PROCESS):
        assert vector.of_processes(part, numbers) == [0.0, 0.0, index + 7.0]
