"""Races on the device `sim`: each kind as a small program that is caught, and its correct twin that passes."""

import threading

import pytest
import torch

pytestmark = pytest.mark.usefixtures("sim")


@pytest.fixture
def side():
    """A stream besides the default one."""
    return torch.Stream("sim")


def compute():
    return torch.accelerator.current_stream()


def race(*parts):
    """The message names both operations, their streams and the storage."""
    return pytest.raises(RuntimeError, match="(?s)race on the device sim: .*" + ".*".join(parts))


class TestNewMemory:
    """An allocator gives memory that was freed on a stream to the next tensor of the stream, in its order."""

    def test_is_used_on_another_stream_at_once(self, side):
        torch.ones(4, device="sim")
        fresh, host = torch.empty(4, device="sim"), torch.ones(4).pin_memory()
        with side, race("copy to the device", "writes storage #", "earlier work", "default stream"):
            fresh.copy_(host, non_blocking=True)

    def test_is_used_after_waiting_for_its_stream(self, side):
        torch.ones(4, device="sim")
        fresh, host = torch.empty(4, device="sim"), torch.ones(4).pin_memory()
        side.wait_stream(compute())
        with side:
            fresh.copy_(host, non_blocking=True)
        side.synchronize()
        assert fresh.tolist() == [1, 1, 1, 1]


class TestACopyOnASideStream:
    """Device to host on a stream of its own, as messages leave a stage."""

    def test_without_waiting_for_the_computation(self, side):
        x = torch.ones(4, device="sim").mul_(3)
        host = torch.empty(4, pin_memory=True)
        message = race("copy to the host", "stream", "reads storage #", "16 bytes", "mul", "default stream", "writes")
        with side, message:
            host.copy_(x, non_blocking=True)

    def test_after_waiting_for_it(self, side):
        x = torch.ones(4, device="sim").mul_(3)
        host = torch.empty(4, pin_memory=True)
        side.wait_stream(compute())
        with side:
            host.copy_(x, non_blocking=True)
        side.synchronize()
        assert host.tolist() == [3, 3, 3, 3]

    def test_the_host_reads_too_early(self, side):
        x = torch.ones(4, device="sim")
        host = torch.zeros(4).pin_memory()
        side.wait_stream(compute())
        with side:
            host.copy_(x, non_blocking=True)
            done = side.record_event()
        assert host.isnan().all()
        assert compute().query()  # another stream: it tells nothing of the copy
        assert host.isnan().all()
        done.synchronize()
        assert host.tolist() == [1, 1, 1, 1]

    def test_integers_that_are_read_too_early_are_absurd(self):
        host = torch.zeros(4, dtype=torch.int64).pin_memory()
        host.copy_(torch.ones(4, dtype=torch.int64, device="sim"), non_blocking=True)
        assert host.tolist() == [-1] * 4
        torch.accelerator.synchronize()
        assert host.tolist() == [1] * 4

    def test_the_host_writes_to_the_target_too_early(self):
        host = torch.zeros(4).pin_memory()
        host.copy_(torch.ones(4, device="sim"), non_blocking=True)
        host[0] = 5
        with race("the host wrote to pinned memory", "copy to the host"):
            torch.accelerator.synchronize()

    def test_the_values_are_those_of_the_launch(self):
        x, host = torch.ones(4, device="sim"), torch.empty(4, pin_memory=True)
        host.copy_(x, non_blocking=True)
        x.mul_(9)  # later work of the same stream
        torch.accelerator.synchronize()
        assert host.tolist() == [1, 1, 1, 1]

    def test_pageable_memory_makes_the_host_wait(self):
        host = torch.zeros(4)
        host.copy_(torch.ones(4, device="sim"), non_blocking=True)
        assert host.tolist() == [1, 1, 1, 1]


class TestACopyToTheDevice:
    """Host to device on a stream of its own, as messages arrive at a stage."""

    def test_used_without_waiting_for_it(self, side):
        host = torch.ones(4).pin_memory()
        with side:
            x = host.to("sim", non_blocking=True)
        with race("mul", "default stream", "reads storage", "copy to the device", "writes"):
            x.mul(2)
        x.record_stream(compute())

    def test_used_after_waiting_for_its_event(self, side):
        host = torch.ones(4).pin_memory()
        with side:
            x = host.to("sim", non_blocking=True)
            arrived = side.record_event()
        arrived.wait(compute())
        x.record_stream(compute())
        assert x.mul(2).tolist() == [2, 2, 2, 2]

    def test_an_event_of_another_stream_does_not_help(self, side):
        host, other = torch.ones(4).pin_memory(), torch.Stream("sim")
        with side:
            x = host.to("sim", non_blocking=True)
        other.record_event().wait(compute())
        with race("copy to the device"):
            x.mul(2)
        x.record_stream(compute())

    def test_an_event_that_was_recorded_before_the_copy_does_not_help(self, side):
        host, early = torch.ones(4).pin_memory(), side.record_event()
        with side:
            x = host.to("sim", non_blocking=True)
        early.wait(compute())
        with race("copy to the device"):
            x.mul(2)
        x.record_stream(compute())

    def test_the_source_is_overwritten_before_a_kernel_needs_it(self):
        host = torch.ones(4).pin_memory()
        x = host.to("sim", non_blocking=True)
        host.fill_(7)
        with race("the host changed pinned memory", "copy to the device"):
            x.mul(2)

    def test_the_source_is_overwritten_before_the_host_knows(self):
        host = torch.ones(4).pin_memory()
        x = host.to("sim", non_blocking=True)
        x.mul(2)
        host.fill_(7)
        with race("the host changed pinned memory", "copy to the device"):
            torch.accelerator.synchronize()

    def test_the_source_that_is_overwritten_gives_wrong_numbers(self, sim):
        sim.set_races(False)
        host = torch.ones(4).pin_memory()
        x = host.to("sim", non_blocking=True)
        host.fill_(7)
        assert x.tolist() == [7, 7, 7, 7]

    def test_the_source_may_be_overwritten_after_synchronising(self):
        host = torch.ones(4).pin_memory()
        x = host.to("sim", non_blocking=True)
        compute().synchronize()
        host.fill_(7)
        assert x.tolist() == [1, 1, 1, 1]

    def test_the_source_may_be_freed(self):
        host = torch.ones(4).pin_memory()
        x = host.to("sim", non_blocking=True)
        del host
        assert x.tolist() == [1, 1, 1, 1]

    def test_pageable_memory_is_read_before_the_host_goes_on(self):
        host = torch.ones(4)
        x = host.to("sim", non_blocking=True)
        host.fill_(7)
        assert x.tolist() == [1, 1, 1, 1]


class TestMemoryOfTwoStreams:
    def test_written_while_another_stream_reads(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            total = x.sum()
        with race("mul", "default stream", "writes", "sum", "reads"):
            x.mul_(2)
        x.record_stream(side)
        side.synchronize()
        assert total.item() == 4

    def test_written_after_the_other_stream_has_read(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            total = x.sum()
        compute().wait_stream(side)
        x.mul_(2)
        assert total.item() == 4

    def test_both_may_read(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            y = x + 1
        z = x + 2
        side.synchronize()
        assert (y + z).tolist() == [5, 5, 5, 5]

    def test_each_may_have_a_part(self, side):
        x = torch.zeros(8, device="sim")
        side.wait_stream(compute())
        with side:
            x[:4].add_(1)
        x[4:].add_(2)
        with race("sum", "reads", "add", "writes"):
            x.sum()
        side.synchronize()
        assert x.sum().item() == 12

    def test_pinned_memory_is_shared_in_order_too(self, side):
        host, x, y = torch.empty(4, pin_memory=True), torch.ones(4, device="sim"), torch.zeros(4, device="sim")
        side.wait_stream(compute())
        host.copy_(x, non_blocking=True)
        with side, race("copy to the device", "reads pinned memory", "copy to the host"):
            y.copy_(host, non_blocking=True)
        side.wait_stream(compute())
        with side:
            y.copy_(host, non_blocking=True)  # no wait of the host between the two
        side.synchronize()
        assert y.tolist() == [1, 1, 1, 1]

    def test_two_devices_wait_for_each_other(self, side):
        x = torch.ones(4, device="sim:0")
        with torch.Stream("sim:1"):
            y = x.to("sim:1")
            assert y.add_(1).tolist() == [2, 2, 2, 2]
        x.add_(1)
        with side, race("copy", "add"):
            x.to("sim:1")

    def test_two_threads(self, side):
        x, errors = torch.ones(4, device="sim"), []

        def read():
            try:
                with side:
                    x.sum()
            except RuntimeError as error:
                errors.append(str(error))

        def run():
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

        run()
        assert len(errors) == 1
        assert "race on the device sim" in errors[0]
        torch.accelerator.synchronize()  # what one thread has waited for, all have
        run()
        assert len(errors) == 1
        side.synchronize()


class TestMemoryThatIsFreed:
    def test_while_another_stream_uses_it(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            total = x.sum()
        del x
        with race("storage", "allocated on the default stream", "was freed while", "sum", "record_stream"):
            torch.zeros(1, device="sim")
        side.synchronize()
        assert total.item() == 4

    def test_after_record_stream(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            total = x.sum()
        x.record_stream(side)
        del x
        torch.zeros(1, device="sim")
        side.synchronize()
        assert total.item() == 4

    def test_after_its_stream_has_waited(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            total = x.sum()
        compute().wait_stream(side)
        del x
        assert total.item() == 4

    def test_after_the_host_has_waited(self, side):
        x = torch.ones(4, device="sim")
        side.wait_stream(compute())
        with side:
            total = x.sum()
        side.synchronize()
        del x
        assert total.item() == 4

    def test_while_a_copy_to_the_host_is_under_way(self, side):
        x, host = torch.ones(4, device="sim"), torch.empty(4, pin_memory=True)
        side.wait_stream(compute())
        with side:
            host.copy_(x, non_blocking=True)
        del x
        with race("was freed while", "copy to the host"):
            torch.accelerator.synchronize()
        assert host.tolist() == [1, 1, 1, 1]


class TestAutograd:
    def test_a_backward_pass_runs_on_the_streams_of_its_forward_pass(self, side):
        weight = torch.ones(4, 4, device="sim", requires_grad=True)
        side.wait_stream(compute())
        with side:
            hidden = weight @ weight
        compute().wait_stream(side)
        hidden.sum().backward()
        assert weight.grad.tolist() == [[8.0] * 4] * 4
        compute().wait_stream(side)

    def test_a_race_in_a_backward_pass_reaches_the_caller(self, side):
        weight, factor = torch.ones(4, device="sim", requires_grad=True), torch.ones(4, device="sim")
        loss = (weight * factor).sum()
        side.wait_stream(compute())
        with side:
            factor.data.mul_(2)  # unseen by autograd, which would refuse
        with race("mul", "default stream", "reads", "mul", "writes"):
            loss.backward()
        compute().wait_stream(side)


def test_switched_off_races_are_no_errors(sim, side):
    sim.set_races(False)
    x = torch.ones(4, device="sim")
    with side:
        assert x.sum().item() == 4
