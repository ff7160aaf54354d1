"""`thinpipe doctor` at a real hub, and where something is broken: every finding says what to do."""

import asyncio
import json
import re
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace

import msgspec
import pytest

from tests.programs import Program
from tests.swarm.hubs import identity_of, running_hub
from thinpipe.cli import main
from thinpipe.config.hub import HubConfig
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.data import ShardWriter, Tokens
from thinpipe.doctor import machine
from thinpipe.doctor.disk_and_port import checkpoints_nbytes
from thinpipe.doctor.hub import members_finding
from thinpipe.doctor.run import assigned_memory_finding
from thinpipe.planning.calibration import Calibration, device_key, save_calibration
from thinpipe.swarm.protocol.status import Status
from thinpipe.training.trainer import Trainer


@pytest.fixture
def examine(capsys, tmp_path):
    """The findings by what was looked at, and the exit code; `config` is written as the run's file."""

    def examine(*arguments, config=None):
        if config is not None:
            (tmp_path / "run.toml").write_text(dump_toml(config))
            arguments = (tmp_path / "run.toml", *arguments)
        capsys.readouterr()  # what a run has printed before
        code = main(["doctor", *map(str, arguments), "--json"])
        found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert all(finding["fix"] for finding in found.values() if finding["state"] in ("warning", "problem"))
        assert code == int(any(finding["state"] == "problem" for finding in found.values()))
        return found

    return examine


def states(found):
    return {what: finding["state"] for what, finding in found.items()}


def test_a_good_machine_and_a_good_run(run_config, examine, tmp_path):
    found = examine("--host", config=run_config)
    assert set(states(found).values()) == {"ok"}
    assert list(found) == [
        "python", "torch", "devices", "device class", "threads", "extras", "nats-server",
        "data", "disk", "memory", "port",
    ]  # fmt: skip
    assert "vocabulary of 64" in found["data"]["text"]
    assert not run_config.job.dump_folder.exists()
    program = Program(tmp_path, "doctor", "doctor", tmp_path / "run.toml")
    assert program.finish() == 0
    assert program.printed.split("\n")[1].split()[:3] == ["1", "python", "ok"]


def test_a_broken_run_says_what_to_do(run_config, examine, tmp_path):
    (tmp_path / "broken.toml").write_text("[training]\nstesp = 1\n")
    assert "training.steps" in examine(tmp_path / "broken.toml")["settings"]["text"]
    missing = replace(run_config, data=replace(run_config.data, path=tmp_path / "nowhere"))
    found = examine(config=missing)
    assert (found["data"]["state"], found["memory"]["state"]) == ("problem", "not checked")
    assert "thinpipe tokenize" in found["data"]["fix"]
    gpu = replace(run_config, training=replace(run_config.training, device="cuda:7"))
    assert examine(config=gpu)["memory"]["state"] == "problem"


def test_other_tokens_than_the_checkpoint_was_trained_on(run_config, examine, tokens, tmp_path):
    Trainer(replace(run_config, training=replace(run_config.training, steps=4))).train()
    assert examine(config=run_config)["data"]["state"] == "ok"
    train = Tokens(tokens / "train")
    with ShardWriter(
        tmp_path / "others/train", train.manifest.vocabulary, source="x", max_shard_tokens=10**6
    ) as writer:
        writer.add(train.read(0, 5000)[::-1].astype("uint32"), text_nbytes=15_003)
        writer.finish()
    other = replace(run_config, data=replace(run_config.data, path=tmp_path / "others"))
    assert "other tokens" in examine(config=other)["data"]["text"]


@pytest.mark.parametrize("side", ["train", "validation"])
def test_a_token_file_that_has_changed(run_config, examine, tokens, tmp_path, side):
    copy = shutil.copytree(tokens, tmp_path / "copy")
    here = replace(run_config, data=replace(run_config.data, path=copy))
    assert "every file has its recorded sha256" in examine(config=here)["data"]["text"]
    shard = copy / side / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    found = examine(config=here)
    assert found["data"]["state"] == "problem"
    assert f"{shard} has changed since it was written" in found["data"]["text"]
    assert found["memory"]["state"] == "ok", "what the manifest says is still known"


def test_metrics_whose_extra_is_not_there(run_config, examine, monkeypatch):
    asked = replace(run_config, metrics=replace(run_config.metrics, dashboard=0, prometheus=0, tensorboard=True))
    assert examine(config=asked)["metrics"]["text"] == "dashboard, prometheus, tensorboard"
    for module in ("uvicorn", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    found = examine(config=asked)["metrics"]
    assert (found["state"], "tensorboard" in found["text"]) == ("problem", False)
    assert 'pip install "thinpipe[dashboard,prometheus]"' in found["fix"]


def test_a_disk_that_is_too_small_and_a_folder_that_cannot_be(run_config, examine):
    """More checkpoints than fit on any disk, none of them deleted."""
    forever = replace(
        run_config,
        training=replace(run_config.training, steps=10**12),
        checkpoint=CheckpointConfig(interval=1, keep_latest_k=0),
    )
    assert examine(config=forever)["disk"]["state"] == "problem"
    assert checkpoints_nbytes(forever, 10) == 10**13
    assert checkpoints_nbytes(replace(run_config, checkpoint=CheckpointConfig(keep_latest_k=2)), 10) == 30
    unwritable = replace(run_config, job=JobConfig(dump_folder="/proc/nowhere"))
    found = examine(config=unwritable)["disk"]
    assert (found["state"], "cannot be written" in found["text"]) == ("problem", True)


def test_a_model_that_is_too_large(run_config, examine):
    huge = replace(run_config, model=replace(run_config.model, dim=2**17, hidden_dim=2**22))
    found = examine(config=huge)["memory"]
    assert found["state"] == "problem"
    assert "largest segment" in found["text"]


def test_a_port_that_is_taken(run_config, examine):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        fields = {name: getattr(run_config, name) for name in run_config.__dataclass_fields__}
        run_host = HubConfig(**fields)
        run_host = replace(run_host, hub=replace(run_host.hub, port=taken.getsockname()[1]))
        assert examine("--host", config=run_host)["port"]["state"] == "problem"


def invite_of(running):
    asked = asyncio.run_coroutine_threadsafe(running.hub.admission.invite(), running.loop)
    return asked.result(60)


def test_a_hub_is_reached_and_its_invite_not_used_up(run_config, examine, tmp_path):
    with running_hub(run_config, ("p0",)) as running:
        invite = invite_of(running)
        found = examine("--invite", invite.line())
        assert [found[what]["state"] for what in ("hub's name", "hub's port", "certificate", "invite")] == ["ok"] * 4
        assert invite.id in running.hub.broker.invites
        assert (found["clock"]["state"], "not use it up" in found["invite"]["text"]) == ("ok", True)
        assert found["data"]["text"] == running.hub.run_host.who_reads
        assert re.fullmatch(r"\S+ .bps up, \S+ .bps down, \d+ ms round trip", found["link"]["text"])

        assert found["versions"]["state"] == "ok"
        running.hub.admission._numerics = msgspec.structs.replace(running.hub.run_host.numerics, version=0)
        versions = examine("--invite", invite.line())["versions"]
        assert versions["state"] == "problem"
        assert versions["text"].startswith("your copy of thinpipe differs from the hub's (yours has numerics version ")
        running.hub.admission._numerics = running.hub.run_host.numerics

        wrong = msgspec.structs.replace(invite, fingerprint="0" * 64)
        found = examine("--invite", wrong.line())
        assert found["certificate"]["state"] == "problem"
        assert "invite" not in found

        host, port = running.hub.broker.url.removeprefix("tls://").split(":")
        assert running.hub.broker.fingerprint in examine("--hub", f"{host}:{port}")["certificate"]["text"]

        running.hub.broker.revoke_invite(invite.id)
        assert "it was revoked, or" in examine("--invite", invite.line())["invite"]["text"]

        with running.connection("p0") as connection:
            me = identity_of(connection.address)
        (tmp_path / "joined").mkdir()
        (tmp_path / "joined/identity.toml").write_text(dump_toml(me))
        found = examine("--invite", tmp_path / "joined")
        assert (found["key"]["state"], "p0" in found["key"]["text"]) == ("ok", True)
        assert found["clock"]["state"] == "ok"
        assert re.fullmatch(r"\S+ .bps up, \S+ .bps down, \d+ ms round trip", found["link"]["text"])
        assert found["memory"]["state"] == "not checked"
        assert found["members"]["state"] == "ok"
        assert found["data"]["text"] == running.hub.run_host.who_reads
        for days, words in ((-1, "24.0 h ahead of the hub's clock"), (1, "24.0 h behind the hub's clock")):
            broker = running.hub.broker
            broker.clock = lambda apart=86400 * days: time.time() + apart
            another = invite_of(running)
            for given in (tmp_path / "joined", another.line()):
                clock = examine("--invite", given)["clock"]
                assert (clock["state"], clock["text"]) == ("warning", words)
        running.hub.generations.suspensions.suspend("p0", "bad values", time.monotonic())
        found = examine("--invite", tmp_path / "joined")["members"]
        assert found["state"] == "problem"
        assert re.match(r"the hub has suspended this machine for another .*: bad values", found["text"])


def test_what_the_hub_has_found_of_others_is_a_warning():
    known = {"run": "r", "generation": 1, "waits_for": "", "peers": [], "absent": []}
    status = Status(**known, bottleneck="", hub_bps=None, progress={})
    assert members_finding(status, "ada").state == "ok"
    found = members_finding(msgspec.structs.replace(status, suspended={"bela": "for another minute"}, alarms=2), "ada")
    assert found.state == "warning"
    assert found.text.startswith("2 alarm(s)")
    assert "bela is suspended for another minute" in found.text


def test_a_hub_that_is_not_there(examine, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = examine("--hub", f"127.0.0.1:{port}")
    assert (found["hub's name"]["state"], found["hub's port"]["state"]) == ("ok", "problem")
    assert "certificate" not in found
    assert examine("--hub", "no-such-host.invalid:4222")["hub's name"]["state"] == "problem"
    assert "damaged" in examine("--invite", "thinpipe3:nonsense")["invite"]["text"]
    found = examine("--invite", tmp_path)["invite"]
    assert (found["state"], str(tmp_path) in found["text"]) == ("problem", True)
    assert main(["doctor", "--hub", "nowhere"]) == 2


def test_what_listens_without_tls_is_no_hub(examine):
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()

        def answer():
            for _ in range(2):  # the look at the port, and the one at the certificate
                with plain.accept()[0] as accepted:
                    accepted.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert examine("--hub", f"127.0.0.1:{plain.getsockname()[1]}")["certificate"]["state"] == "problem"
        thread.join(60)


def test_a_joined_folder_knows_what_its_segments_need(run_config):
    Trainer(replace(run_config, training=replace(run_config.training, steps=4))).train()
    assert assigned_memory_finding(run_config.job.dump_folder, 2, "cpu").state == "ok"
    assert assigned_memory_finding(run_config.job.dump_folder, 0, "cpu").state == "not checked"


def test_a_device_that_nobody_has_tested_is_to_be_proved(monkeypatch, tmp_path):
    """Until `thinpipe selftest` has passed on it, with this torch."""
    monkeypatch.setenv("THINPIPE_STATE_FOLDER", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert machine._proof("cpu", "a processor", "2.15.0") == ""
    assert "thinpipe selftest" in machine._proof("cuda", "a card", "2.15.0")
    save_calibration(device_key("cuda", "a card"), Calibration(torch="2.15.0"))
    assert machine._proof("cuda", "a card", "2.15.0") == ""
    assert "thinpipe selftest" in machine._proof("cuda", "a card", "2.16.0")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert "thinpipe selftest" in machine._proof("cpu", "a processor", "2.15.0")
