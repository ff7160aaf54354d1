"""One order of additions, in whatever hands the rows are: the hub's, the run's root's, or torch's group."""

import queue
from threading import Thread

import numpy as np
import pytest
import torch
import torch.distributed as dist

from thinpipe.swarm.hub.services.reduction import StepReduction
from thinpipe.transport.collectives import GroupCollectives, StarCollectives
from thinpipe.transport.reduction import reduce_rows

SIZES = [(2, 1), (3, 7), (5, 1), (5, 64), (8, 1), (8, 1000), (17, 1), (64, 1), (64, 100), (7, 100_000)]
"""Processes and numbers of each. For most of these numpy's or torch's `sum(0)` adds in another order."""


def wide_rows(processes, count):
    """Numbers so different in size that another order of additions gives other bits."""
    random = np.random.default_rng(processes * count)
    return random.standard_normal((processes, count)) * np.exp(5 * random.standard_normal((processes, count)))


def added_one_by_one(rows):
    totals = []
    for column in rows.T.tolist():
        total = column[0]
        for number in column[1:]:
            total += number
        totals.append(total)
    return totals


class QueueGroup(GroupCollectives):
    """Members in threads of one process; a message is a copy in a queue."""

    def __init__(self, rank, size, queues):
        super().__init__(rank, size)
        self.queues = queues

    def send(self, tensors, dst, tag=0):
        self.queues[self.rank(), dst, tag].put(tensors[0].clone())
        return QueueWork(lambda: None)

    def recv(self, tensors, src, tag=0):
        return QueueWork(lambda: tensors[0].copy_(self.queues[src, self.rank(), tag].get(timeout=300)))


class QueueWork(dist.Work):
    def __init__(self, action):
        super().__init__()
        self.action = action

    def wait(self, timeout=None):  # noqa: ARG002
        self.action()
        return True


def in_all(size, action):
    """What `action(group)` returned in each member."""
    queues = {(a, b, tag): queue.Queue() for a in range(size) for b in range(size) for tag in range(10)}
    groups, found = [QueueGroup(rank, size, queues) for rank in range(size)], [None] * size

    def run(rank):
        found[rank] = action(groups[rank])

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


def by_torch(group, rows, op=dist.ReduceOp.SUM):
    tensor, options = torch.tensor(rows[group.rank()]), dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return tensor.tolist()


@pytest.mark.parametrize(("processes", "count"), SIZES)
def test_rows_are_added_in_rank_order(processes, count):
    rows = wide_rows(processes, count)
    expected = added_one_by_one(rows)
    assert reduce_rows("sum", list(rows)).tolist() == expected
    assert reduce_rows("sum", list(np.asfortranarray(rows))).tolist() == expected
    assert reduce_rows("avg", list(rows)).tolist() == [total / processes for total in expected]


def test_another_order_would_be_noticed():
    rows = wide_rows(8, 1000)
    assert reduce_rows("sum", list(rows[::-1])).tolist() != added_one_by_one(rows)


@pytest.mark.parametrize(("processes", "count"), [(2, 1), (3, 7), (5, 64), (8, 100)])
def test_hub_run_and_group_give_the_same_bits(processes, count):
    rows = wide_rows(processes, count)
    expected = added_one_by_one(rows)
    names = [f"p{rank}" for rank in range(processes)]
    hub = StepReduction(1, names)
    for rank in reversed(range(processes)):
        hub.contribute(names[rank], 1, 1, "sum", rows[rank])
    assert hub.result(1).tolist() == expected
    assert in_all(processes, lambda g: StarCollectives(g).all_reduce_sum(rows[g.rank()].tolist())) == (
        [expected] * processes
    )
    assert in_all(processes, lambda g: by_torch(g, rows)) == [expected] * processes


@pytest.mark.parametrize(
    ("op", "expected"),
    [("SUM", [6, 2**62 + 3]), ("AVG", [2.0, 5.0]), ("MAX", [3, 2**62]), ("MIN", [1, 1])],
)
def test_a_group_reduces_whole_numbers_exactly(op, expected):
    rows = [[1, 2**62], [2, 1], [3, 2]] if op != "AVG" else [[1.0, 6.0], [2.0, 4.0], [3.0, 5.0]]
    assert in_all(3, lambda g: by_torch(g, rows, getattr(dist.ReduceOp, op))) == [expected] * 3


@pytest.mark.parametrize(
    ("op", "rows", "expected"),
    [("sum", (np.inf, -np.inf), "nan"), ("sum", (1e308, 1e308), "inf"), ("max", (1.0, np.nan), "nan")],
)
def test_what_is_not_finite_is_passed_on_without_a_warning(op, rows, expected):
    assert str(reduce_rows(op, [np.array([row]) for row in rows])[0]) == expected


def test_bytes_of_every_process_in_rank_order():
    for offered in ([b"a", b"", b"cc"], [b"", b"", b""], [b"", b"bb", b""]):
        assert in_all(3, lambda g, offered=offered: StarCollectives(g).all_gather_bytes(offered[g.rank()])) == (
            [offered] * 3
        )
