"""`thinpipe plan` of runs on published models, from config.json or from the model's files: one law with the check
before training."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.chats import write_run_data
from thinpipe.api.planning import model_to_plan
from thinpipe.boundary.sizes import id_nbytes, packed_nbytes
from thinpipe.cli import main
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.model import ExecutionConfig
from thinpipe.config.run import DataConfig, ModelSettings, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.config.toml import dump_toml
from thinpipe.planning.alternatives import find_alternatives
from thinpipe.planning.fitting import machines_needed, memory_of_processes
from thinpipe.planning.machines import Machine, Machines
from thinpipe.planning.memory_budget import MemoryBudget
from thinpipe.planning.planner import estimate_cost, make_plan
from thinpipe.planning.search import search
from thinpipe.planning.segment_costs import needs_by_kernel, segment_costs
from thinpipe.planning.stored_model import StoredModel, cut

GB = 10**9
PUBLISHED = Path(__file__).parent / "published"
HOME = """[[machine]]
name = "home"
device = "RTX 3060"
host_memory = "32GB"
up = "20mbps"
down = "100mbps"
count = 4
"""


def settings(source=PUBLISHED / "Llama-3.1-8B", *, boundaries=(8, 16, 24), **sections) -> RunConfig:
    config = RunConfig(
        model=ModelSettings(hf=str(source), boundaries=boundaries or None),
        lora=LoraConfig(r=16),
        training=TrainingConfig(steps=100, global_batch_size=16, seq_len=512, precision="bf16"),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=len(boundaries) + 1, pipeline_parallel_microbatch_size=1
        ),
        execution=ExecutionConfig(checkpoint_activations="block"),
        boundary=BoundaryConfig(preset="tuning") if boundaries else BoundaryConfig(),
    )
    return replace(config, **sections)


@pytest.fixture(scope="module")
def llama() -> StoredModel:
    model, _ = model_to_plan(settings(), None)
    assert isinstance(model, StoredModel)
    return model


def machines(count=4, **changes) -> Machines:
    fields = {"flops": 1e13, "memory_nbytes": 12 * GB, "up_bps": 20e6, "down_bps": 1e8, "latency_s": 0.01}
    return Machines(machines=tuple(Machine(name=f"m{index}", **{**fields, **changes}) for index in range(count)))


def test_the_command_says_what_is_downloaded_and_sent(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(dump_toml(settings()))
    (tmp_path / "machines.toml").write_text(HOME)
    command = ["plan", str(tmp_path / "run.toml"), "--machines", str(tmp_path / "machines.toml")]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "41.9 M trainable numbers in adapters of rank 16",
        "it fits",
        "of the base, once",
        "in its host's memory",
    ):
        assert words in said
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    ends, inner = plan["machines"][0], plan["machines"][1]
    table = 128_256 * 4096
    assert ends["base_download_nbytes"] - inner["base_download_nbytes"] == 2 * table
    assert all(each["memory_nbytes"]["frozen_tables"] == each["base_download_nbytes"] for each in plan["machines"])
    assert sum(each["checkpoint_nbytes"] for each in plan["machines"]) == 12 * 41_943_040
    assert [each["rented"] for each in plan["alternatives"]] == [False, True]


def test_the_files_of_a_model_plan_as_its_config_does(llama, tmp_path):
    """Headers alone are read: the files here have no weights."""
    shapes = {name: shape for block in llama.blocks for name, shape in block.items()} | llama.first | llama.last
    header = json.dumps(
        {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_bytes((PUBLISHED / "Llama-3.1-8B" / "config.json").read_bytes())
    config = settings(tmp_path)
    assert model_to_plan(config, None) == (llama, [])


@pytest.mark.parametrize("lora", [None, LoraConfig(r=8)])
def test_a_plan_and_the_check_before_training_count_the_same(lora, llama):
    config = settings(lora=lora)
    plan = make_plan(config, llama, machines(memory_nbytes=200 * GB))
    card = MemoryBudget(place="card", free_nbytes=12 * GB, host_free_nbytes=32 * GB)
    assert [load.memory for load in plan.machine_loads] == memory_of_processes(config, llama, card)


def test_bases_in_fewer_bits_take_less(llama):
    def frozen(kind):
        config = settings(model=replace(settings().model, quantize_base=kind))
        return sum(cost.frozen_nbytes for cost in segment_costs(llama, config))

    tables = 2 * 2 * 128_256 * 4096
    matrices = frozen(None) - tables
    assert (frozen("int8") - tables) / matrices == pytest.approx(0.5, abs=1e-3)
    assert (frozen("nf4") - tables) / matrices == pytest.approx(0.516 / 2, abs=1e-3)


def test_adapters_do_less_work_than_training_in_full(llama):
    adapted, full = (
        sum(cost.flops_per_token for cost in segment_costs(llama, settings(lora=lora, execution=ExecutionConfig())))
        for lora in (LoraConfig(r=16), None)
    )
    assert 4 / 6 < adapted / full < 4 / 6 + 0.03


def test_hubs_place_segments_by_needs_with_frozen_weights(llama):
    config = settings()
    needs = needs_by_kernel(llama, config)
    costs = segment_costs(llama, config)
    assert all(need.memory_nbytes > cost.frozen_nbytes for need, cost in zip(needs, costs, strict=True))
    assert needs[1].flops_per_token == needs[2].flops_per_token == costs[1].flops_per_token


def test_a_model_that_no_home_holds_is_streamed_from_its_host_at_best(llama):
    config = settings()

    def streaming(**changes):
        plan = make_plan(config, llama, machines(**changes))
        return find_alternatives(plan, estimate_cost(plan)).streaming

    here = streaming()
    copied = 2 * (16.06e9 + 4 * 41.9e6) + 4 * 41.9e6
    seconds = here.plan.config.microbatches * copied / here.machine.copy_bytes_per_second
    assert here.plan.timeline.seconds == pytest.approx(max(seconds, sum(here.plan.timeline.busy)), rel=0.01)
    assert streaming(host_memory_nbytes=8 * GB) is None
    assert streaming(host_memory_nbytes=None) is None
    assert streaming(memory_nbytes=30 * GB) is None  # the run as it is fits on one


def test_a_search_cuts_it_for_the_machines(llama):
    equal = machines(memory_nbytes=40 * GB)
    uneven = replace(equal, machines=(replace(equal.machines[0], flops=4e13), *equal.machines[1:]))
    best = search(settings(), llama, uneven).best
    assert best.model.boundaries[0] > 8


def test_a_search_that_cuts_it_counts_what_a_cut_run_sends(llama):
    config = settings(boundaries=())
    best = search(config, cut(llama, config), machines(memory_nbytes=40 * GB)).best
    assert len(best.model.boundaries) == 3
    assert best.config.boundary.preset == "tuning"
    assert best.messages == make_plan(settings(boundaries=best.model.boundaries), best.model, best.machines).messages


def test_the_number_of_machines_is_counted_from_the_blocks(llama):
    card = MemoryBudget(place="card", free_nbytes=6 * GB, host_free_nbytes=32 * GB)
    number, fullest = machines_needed(settings(), llama, card)
    assert 3 <= number <= 5
    assert fullest <= card.usable_nbytes


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        (settings(), ["--vocab-size", "100"], "--vocab-size is for models of thinpipe"),
        (settings(boundaries=(8, 40)), [], "must rise strictly between 1 and 31"),
        (settings("nowhere"), [], "config.json"),
    ],
)
def test_mistakes_are_named(config, flags, says, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(dump_toml(config))
    (tmp_path / "machines.toml").write_text(HOME)
    assert main(["plan", str(tmp_path / "run.toml"), "--machines", str(tmp_path / "machines.toml"), *flags]) == 2
    assert says in capsys.readouterr().err


def test_chats_have_two_flags_a_token_and_labels_go_from_the_first_machine_to_the_last(tmp_path, capsys):
    (tmp_path / "machines.toml").write_text(HOME)
    write_run_data(tmp_path / "chats", longest=20)
    config, plans = settings(), {}
    for name in ("text", "chats"):  # of text there are no tokens yet
        (tmp_path / "run.toml").write_text(dump_toml(replace(config, data=DataConfig(path=tmp_path / name))))
        command = ["plan", str(tmp_path / "run.toml"), "--machines", str(tmp_path / "machines.toml"), "--json"]
        assert main(command) == 0
        plans[name] = json.loads(capsys.readouterr().out)
    text, chats = plans["text"], plans["chats"]
    flags = packed_nbytes(config.training.seq_len + 1, 2) / config.training.seq_len
    assert chats["boundary"]["bytes_per_token"] - text["boundary"]["bytes_per_token"] == pytest.approx(flags)
    for plan in (text, chats):
        sent = {link["link"]: link["bytes_per_token"] for link in plan["links"]}
        first, inner, last = (sent[f"the link of home-{number} (up)"] for number in (1, 2, 4))
        state = inner - last  # the last sends gradients alone, an inner one states too
        assert id_nbytes(128_256) < first - state < 2 * id_nbytes(128_256)  # beside the sum of a step


def test_boundaries_belong_to_the_plan_and_not_to_the_shapes(llama):
    assert cut(llama, settings(boundaries=(3,))).segments == (range(3), range(3, 32))
    assert hash(llama) == hash(replace(llama))
