"""Machines files: what they come to, and what people get wrong."""

import math
from pathlib import Path

import pytest

from thinpipe.config.run import RunConfig, TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.core.state_folder import STATE_FOLDER_VARIABLE
from thinpipe.planning.calibration import Calibration, device_key, save_calibration
from thinpipe.planning.devices import DEVICES, find_device, precision_of
from thinpipe.planning.machines import Hub, Machine, load_machines
from thinpipe.swarm.protocol.machine_report import MachineReport, ProcessorReport
from thinpipe.swarm.protocol.status import PeerStatus, Status, machines_from_status

EXAMPLES = Path(__file__).parents[2] / "examples"
CARDS = "cards: 500 MB for context and libraries, 5% of the memory for fragmentation (overhead)"


@pytest.fixture
def load(tmp_path):
    def load(text, **options):
        path = tmp_path / "machines.toml"
        path.write_text(text)
        return load_machines(path, **options)

    return load


def test_all_that_can_be_said_of_a_machine(load):
    machines = load(
        """
        currency = "EUR"
        [[machine]]
        name = "ada"
        tflops = 40
        memory = "20GB"
        up = "20mbps"
        down = "100mbps"
        latency = "15ms"
        price = 0.5
        host = "desk"
        cores = 2
        duplex = "shared"
        latency_per = "message"
        overhead = "600MB"
        host_memory = "64GB"
        copy_rate = "80gbps"
        """
    )
    assert machines.machines == (
        Machine(
            name="ada",
            flops=40e12,
            memory_nbytes=20_000_000_000,
            up_bps=20e6,
            down_bps=100e6,
            latency_s=0.015,
            price_per_hour=0.5,
            host="desk",
            cores=2,
            duplex="shared",
            latency_per="message",
            overhead_nbytes=600_000_000,
            host_memory_nbytes=64e9,
            copy_bytes_per_second=10e9,
        ),
    )
    assert (machines.hub, machines.currency, machines.assumptions) == (None, "EUR", ())


def test_several_alike_and_several_on_one_computer(load):
    machines = load(
        """
        duplex = "shared"
        [[machine]]
        name = "rented"
        device = "L4"
        count = 2
        [[machine]]
        name = "desk"
        tflops = 0.1
        memory = "2GB"
        count = 3
        host = "desk"
        cores = 2
        """
    ).machines
    assert [machine.name for machine in machines] == ["rented-1", "rented-2", "desk-1", "desk-2", "desk-3"]
    assert {machine.cores for machine in machines[2:]} == {2}
    assert {machine.duplex for machine in machines} == {"shared"}


def test_a_device_reaches_a_share_of_its_peak_and_that_is_said(load):
    text = '[[machine]]\ndevice = "RTX 4090"\nup = "1gbps"\ndown = "1gbps"\n'
    machines = load(text)
    [machine] = machines.machines
    assert (machine.name, machine.memory_nbytes) == ("RTX 4090", 24_000_000_000)
    assert machine.flops == pytest.approx(0.35 * 165.2e12)
    assert machines.assumptions == ("RTX 4090: 35% of its peak of 165.2 TFLOP/s in bf16", CARDS)
    assert machine.overhead_nbytes == 500_000_000 + 0.05 * 24_000_000_000
    assert math.isinf(machine.host_memory_nbytes)
    [exact] = load(f"efficiency = 0.5\n{text}", precision="fp32").machines
    assert exact.flops == pytest.approx(0.5 * 82.6e12)
    measured = load(text + "tflops = 70\n")
    assert measured.machines[0].flops == 70e12
    assert measured.machines[0].memory_nbytes == 24_000_000_000
    assert measured.assumptions == (CARDS,)


def test_what_was_measured_on_this_machine_replaces_what_is_assumed(load, tmp_path, monkeypatch):
    monkeypatch.setenv(STATE_FOLDER_VARIABLE, str(tmp_path / "state"))
    measured = Calibration(
        overhead_nbytes=300_000_000,
        fragmentation_share=0.1,
        activation_factor=1.2,
        flops={"bf16-mixed": 60e12, "fp32": 20e12},
        to_device_bytes_per_second=9e9,
        to_host_bytes_per_second=8e9,
    )
    save_calibration(device_key("cuda", "NVIDIA GeForce RTX 4090"), measured)
    text = '[[machine]]\ndevice = "RTX 4090"\nup = "1gbps"\ndown = "1gbps"\n'
    machines = load(text)
    [machine] = machines.machines
    assert (machine.flops, machine.copy_bytes_per_second, machine.activation_factor) == (60e12, 8e9, 1.2)
    assert machine.overhead_nbytes == 300_000_000 + 0.1 * 24_000_000_000
    assert not machines.assumptions
    assert load(text, precision="fp32").machines[0].flops == 20e12
    [other] = load(text.replace("4090", "3090")).machines
    assert other.overhead_nbytes == 500_000_000 + 0.05 * 24_000_000_000


def test_a_processor_computes_in_the_memory_of_its_host(load):
    [laptop] = load('[[machine]]\ndevice = "Laptop CPU"\nmemory = "8GB"\n').machines
    assert laptop.host_memory_nbytes is None
    assert laptop.overhead_nbytes == 400_000_000


def test_a_missing_link_rate_means_no_limit_and_is_listed_as_assumption(load):
    machines = load('[hub]\nup = "1gbps"\n[[machine]]\nname = "a"\ntflops = 1\nmemory = "1GB"\ndown = "1mbps"\n')
    assert math.isinf(machines.machines[0].up_bps)
    assert machines.hub == Hub(up_bps=1e9, down_bps=math.inf)
    assert [words.split(":")[0] for words in machines.assumptions] == [
        "400 MB beside tensors (overhead)",
        "the link of a is not given (up)",
        "the link of the hub is not given (down)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"machines.toml: there is no \[\[machine\]\]"),
        ('[[machine]]\nname = "a"', r"machine 'a': say how fast it is: device, for example RTX 4090, or tflops"),
        ('[[machine]]\ntflops = 3\nmemory = "1GB"', r"needs a name"),
        ('[[machine]]\ndevice = "RTX 4900"', r"did you mean 'RTX 4090'"),
        ('[[machine]]\ndevice = "abacus"', r"known are RTX 3060, .* write tflops and memory instead"),
        ('[[machine]]\nname = "a"\ntflops = 3', r"machine 'a': say how much memory"),
        ('[[machine]]\ndevice = "Laptop CPU"', r"machine 'Laptop CPU': say how much memory"),
        (
            '[[machine]]\ndevice = "L4"\nmemry = "2GB"',
            r"unknown key machine\[0\].memry: did you mean machine\[0\].memory",
        ),
        ('[[machines]]\ndevice = "L4"', r"unknown key machines: did you mean machine\?"),
        ('[hub]\nupload = "1gbps"', r"unknown key hub.upload: did you mean hub.up\?"),
        ('[[machine]]\ndevice = "L4"\nup = "20"', r"machine 'L4': up: '20' is not a rate: write bits per second"),
        ('[[machine]]\ndevice = "L4"\nup = 20', r"machine\[0\].up: expected str \| null, got int"),
        ('[[machine]]\ndevice = "L4"\nlatency = "20"', r"machine 'L4': latency: '20' is not a duration"),
        ('[[machine]]\ndevice = "L4"\nmemory = "24"', r"machine 'L4': memory: '24' is not a size"),
        ('[[machine]]\ndevice = "L4"\ncount = 0', r"machine 'L4': count must be above 0"),
        ('[[machine]]\ndevice = "L4"\nprice = -1', r"price must be at least 0"),
        ('[[machine]]\ndevice = "L4"\ncores = 2', r"set host, or leave cores out"),
        ('[[machine]]\ndevice = "L4"\nduplex = "half"', r"machine\[0\].duplex: invalid enum value 'half'"),
        ('[[machine]]\ndevice = "L4"\n[[machine]]\ndevice = "L4"', r"two machines are called 'L4': give them names"),
        (
            '[[machine]]\ndevice = "L4"\nhost = "x"\ncores = 2\n[[machine]]\ndevice = "T4"\nhost = "x"\ncores = 3',
            r"host 'x' has 2 cores and 3: say one",
        ),
        ("efficiency = 35", r"efficiency must be above 0 and at most 1, not 35.0: 0.35 is 35 %"),
        ('[hub]\ndown = "fast"', r"hub: down: 'fast' is not a rate"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(load, text, message):
    with pytest.raises(UserError, match=message):
        load(text)


@pytest.mark.parametrize("spelling", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_devices_are_found_in_any_spelling(spelling):
    assert find_device(spelling) == ("RTX 4090", DEVICES["RTX 4090"])


def test_every_device_is_found_by_its_own_name():
    assert all(find_device(name)[0] == name for name in DEVICES)
    assert all(device.bf16_tflops >= device.fp32_tflops > 0 for device in DEVICES.values())


def test_the_precision_of_a_run():
    assert precision_of(RunConfig()) == "fp32"
    assert precision_of(RunConfig(training=TrainingConfig(precision="bf16-mixed"))) == "bf16"
    assert precision_of(RunConfig(training=TrainingConfig(precision="bf16"))) == "bf16"


def test_peers_that_were_measured():
    processor = ProcessorReport(
        device="card", threads=2, flops=5e10, memory_nbytes=4_000_000_000, host_memory_nbytes=9_000_000_000
    )
    report = MachineReport(processor=processor, up_bps=1e7, down_bps=5e7, latency_s=0.04, versions={})
    peers = [PeerStatus(name="ada", segments=1, report=report), PeerStatus(name="bela", segments=0, report=None)]
    told = {"run": "r", "generation": 1, "waits_for": "", "absent": [], "bottleneck": "", "progress": {}}
    machines = machines_from_status(Status(peers=peers, hub_bps=(1e8, 2e8), **told), "fp32")
    assert machines.machines == (
        Machine(
            name="ada",
            flops=5e10,
            memory_nbytes=4_000_000_000,
            host_memory_nbytes=9_000_000_000,
            up_bps=1e7,
            down_bps=5e7,
            latency_s=0.02,
        ),
    )
    assert machines.hub == Hub(up_bps=1e8, down_bps=2e8)
    assert machines.assumptions[1] == "bela is left out, because it is not measured yet"
    with pytest.raises(UserError, match="no peer has been measured yet"):
        machines_from_status(Status(peers=peers[1:], hub_bps=(1e8, 2e8), **told), "fp32")


@pytest.mark.parametrize(("name", "count"), [("machines.toml", 4), ("cloud.toml", 6)])
def test_examples_load(name, count):
    machines = load_machines(EXAMPLES / name)
    assert len(machines.machines) == count
    assert all(math.isfinite(machine.up_bps) for machine in machines.machines)
