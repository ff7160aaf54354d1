"""What is said before a start: all of it on a terminal, elsewhere what asks for a change."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.monitor.sample_events import peers, step
from thinpipe.config.hub import HubConfig, HubSettings, JoinConfig
from thinpipe.config.run import DataConfig
from thinpipe.core.errors import UserError
from thinpipe.core.events import EventLog
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.core.run_folder import events_path
from thinpipe.doctor import before_start
from thinpipe.planning.memory_budget import MemoryBudget

WHAT = ["memory:", "disk:", "tokens:", "versions:", "speed:"]


def on_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def as_hub(config, **settings):
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return HubConfig(**fields, hub=HubSettings(host="127.0.0.1", address="127.0.0.1", **settings))


def test_five_lines_on_a_terminal_and_none_elsewhere(run_config, capsys, monkeypatch):
    config = replace(run_config, training=replace(run_config.training, device="cpu"))
    before_start.train(config)
    assert lines_of(capsys) == [], "nothing is to be changed"
    on_terminal(monkeypatch)
    before_start.train(config)
    memory, disk, tokens, versions, speed = lines_of(capsys)
    assert [line.split()[0] for line in (memory, disk, tokens, versions, speed)] == WHAT
    assert "the run needs " in memory
    assert "can be used" in memory
    assert f"which {config.training.steps:,} steps read" in tokens
    assert "no port is needed" in versions
    assert "thinpipe plan FILE --machines here" in speed
    monkeypatch.setenv("RANK", "1")
    before_start.train(config)
    assert lines_of(capsys) == [], "a process of a group says nothing"


def test_what_is_missing_is_said_with_what_to_change(run_config, capsys, tmp_path, monkeypatch):
    small = MemoryBudget(place="the CPU", free_nbytes=1 << 20)
    monkeypatch.setattr(before_start, "host_budget", lambda: small)
    training = replace(run_config.training, device="cpu")
    before_start.train(replace(run_config, training=training, data=DataConfig(path=tmp_path / "nowhere")))
    memory, tokens = lines_of(capsys)
    assert "and 1 MB can be used. To do: " in memory or "1.05 MB can be used. To do: " in memory
    assert tokens.endswith(f"none in {tmp_path}/nowhere. To do: thinpipe tokenize --output {tmp_path}/nowhere, or set "
                           "data.path.")  # fmt: skip


def test_a_hubs_port_that_is_taken_and_what_was_reached_before(run_config, capsys, monkeypatch):
    on_terminal(monkeypatch)
    log = events_path(run_config.job.dump_folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    with EventLog(log) as written:
        written.write(GenerationStarted(generation=1, step=0, peers=peers("anna"), planned_tokens_per_second=900.0))
        written.write(step(1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        before_start.hub(as_hub(run_config, port=port))
    memory, _, _, versions, speed = lines_of(capsys)
    assert "3 segments, of which the largest takes " in memory
    assert f"127.0.0.1:{port}: " in versions
    assert "To do: Stop the program that listens there, or choose another port with --hub.port." in versions
    assert "900 tokens/s were planned and 500 tokens/s were reached in the newest step" in speed


def test_a_joining_machine_says_what_it_offers(tmp_path, capsys, monkeypatch):
    on_terminal(monkeypatch)
    before_start.join(JoinConfig(invite="thinpipe3:x", folder=tmp_path, device="cpu", memory="1GB"))
    lines = lines_of(capsys)
    assert [line.split()[0] for line in lines] == WHAT
    assert lines[0].startswith("memory:   1 GB are offered of ") or "1.00 GB are offered of " in lines[0]
    assert "no port is opened: this machine dials the hub" in lines[3]


def test_a_model_that_a_hub_cannot_begin_is_refused_first(run_config, monkeypatch, capsys):
    on_terminal(monkeypatch)
    small = MemoryBudget(place="the CPU", free_nbytes=1 << 20)
    monkeypatch.setattr("thinpipe.swarm.hub.memory_check.host_budget", lambda: small)
    with pytest.raises(UserError, match="the hub makes the first weights"):
        before_start.hub(as_hub(run_config))
    assert lines_of(capsys) == []


def test_no_torch_is_loaded_for_it():
    code = "import sys, thinpipe.doctor.before_start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
