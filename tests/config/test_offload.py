"""Batches in which the optimiser's state passes through the device."""

from hypothesis import given
from hypothesis import strategies as st

from thinpipe.config.offload import ALIGNED_ROWS, BUFFER_NBYTES, batches_of_rows, streamed_nbytes

STATES = st.lists(st.tuples(st.integers(1, 200_000), st.sampled_from([1, 8, 3000, 32768, 1 << 18])), max_size=6)


def nbytes_of(batch, states):
    return sum(len(rows) * states[index][1] for index, rows in batch)


@given(states=STATES)
def test_every_row_is_in_one_batch_and_slices_are_aligned(states):
    batches = batches_of_rows(states)
    for index, (n_rows, _) in enumerate(states):
        slices = [rows for batch in batches for number, rows in batch if number == index]
        assert [row for rows in slices for row in (rows.start, rows.stop)][1:-1:2] == [r.start for r in slices][1:]
        assert (slices[0].start, slices[-1].stop) == (0, n_rows)
        assert all(rows.start % ALIGNED_ROWS == 0 for rows in slices)
    assert [number for batch in batches for number, _ in batch] == sorted(
        number for batch in batches for number, _ in batch
    )


@given(states=STATES)
def test_a_batch_fits_a_buffer_unless_its_one_slice_cannot_be_smaller(states):
    batches = batches_of_rows(states)
    for batch in batches:
        assert nbytes_of(batch, states) <= BUFFER_NBYTES or (len(batch) == 1 and len(batch[0][1]) <= ALIGNED_ROWS)
    assert streamed_nbytes(states) == min(2, len(batches)) * max((nbytes_of(b, states) for b in batches), default=0)


def test_an_embedding_of_a_large_model_takes_two_buffers():
    moments = 2 * 4 * 4096
    assert streamed_nbytes([(128_256, moments)]) == 2 * BUFFER_NBYTES
    assert streamed_nbytes([(1, 16_000), (1, 4_000)]) == 20_000, "one batch needs one buffer"
