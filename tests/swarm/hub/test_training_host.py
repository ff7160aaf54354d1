"""What a hub has of its run: which peers have the same, and how checkpoints come together from several of them."""

import io
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from tests.programs import events_of
from tests.swarm.commits import announcement, samples_at
from thinpipe.checkpoint import restore
from thinpipe.checkpoint.storage import FileEntry
from thinpipe.core.events import Saved, Started, Step, Stopped
from thinpipe.core.hashing import text_sha256
from thinpipe.core.hub_events import FilesRefused
from thinpipe.core.run_folder import MANIFEST, events_path, step_folder
from thinpipe.models.model import make_space
from thinpipe.planning.partition import Partition
from thinpipe.subspace.basis import Basis
from thinpipe.swarm.hub import training_host
from thinpipe.swarm.hub.commits.history import Commit
from thinpipe.swarm.hub.commits.log import COMMIT_LOG_FILE
from thinpipe.swarm.hub.commits.recovery import SignedCommit
from thinpipe.swarm.hub.replica import Generation
from thinpipe.swarm.hub.training_host import TrainingHost
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import AnnouncementReply
from thinpipe.swarm.protocol.signed_files import COMMIT_FILE
from thinpipe.training.console import LineDisplay
from thinpipe.training.data_loading import tokenizer_sha256
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address

KEY = KeyPair.new()


def begin(run_host, number=1):
    partition = Partition(
        stages=(("a", range(1)), ("b", range(1, 3))),
        standbys=(),
        too_small=(),
        loads=(),
        tokens_per_second=1.0,
        bottleneck="",
    )
    return run_host.begin(Generation(number, partition, {"a": 1, "b": 1}))


def host(config):
    return TrainingHost(config, LineDisplay(Console(file=io.StringIO()), log_freq=1))


@pytest.fixture
def run_host(run_config):
    run = host(run_config)
    yield run
    run.close()


def hashes_at_a_peer(run_host, generation_start, space=None):
    if space is None:
        space = make_space(run_host.model)
        restore(run_host.newest, {}, space)
    return {"settings": text_sha256(generation_start.settings), "tokenizer": tokenizer_sha256({})} | space.hashes


def flipped_bit(matrix_DK):
    changed = matrix_DK.clone()
    changed.view(torch.int32)[3, 1] ^= 1
    return changed


def rotated(matrix_DK):
    """The same subspace, and all norms as they were."""
    width = matrix_DK.shape[1]
    return matrix_DK @ torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]


@pytest.mark.parametrize("change", [flipped_bit, torch.neg, rotated])
def test_a_peer_with_another_basis_is_told_both(run_host, change):
    generation_start = begin(run_host)
    good = hashes_at_a_peer(run_host, generation_start)
    assert run_host.compare_hashes(good) == ""
    bad = good | {"basis": Basis(change(make_space(run_host.model).basis.matrix_DK)).hash}
    assert (
        run_host.compare_hashes(bad)
        == f"basis is {bad['basis']} at the peer and {good['basis']} at the hub: both must be equal"
    )


def test_a_peer_with_another_table_tokenizer_or_settings_is_told_both(run_host, tmp_path):
    generation_start = begin(run_host)
    good = hashes_at_a_peer(run_host, generation_start)
    subspace = run_host.model.subspace
    seeded = replace(run_host.model, subspace=replace(subspace, seed=subspace.seed + 1))
    (tmp_path / "tokenizer.json").write_text("{}")
    others = {
        "token table": make_space(seeded).hashes["token table"],
        "tokenizer": tokenizer_sha256({"tokenizer/tokenizer.json": tmp_path / "tokenizer.json"}),
        "settings": text_sha256(generation_start.settings.replace("seq_len = 16", "seq_len = 8")),
    }
    for field, there in others.items():
        assert there != good[field]
        expected = f"{field} is {there} at the peer and {good[field]} at the hub: both must be equal"
        assert run_host.compare_hashes(good | {field: there}) == expected
    without = {field: value for field, value in good.items() if field != "basis"}
    assert run_host.compare_hashes(without).startswith("basis is none at the peer and ")
    assert run_host.compare_hashes(good | {"more": "1"}).startswith("more is 1 at the peer and none at the hub: ")


def manifest_of(run_host, step, **changes):
    fields = {"step": step, "samples_seen": samples_at(run_host, step)} | changes
    return msgspec.structs.replace(run_host.newest.manifest, **fields).with_checksum()


def tell(run_host, peer, generation, manifest, files=None):
    """With the files that this peer holds, unless others are given."""
    address = Address(url="", fingerprint="r", name=peer, credentials=Credentials(seed=KEY.seed, jwt=""))
    held = run_host.ledger._held.get(peer, ()) if files is None else files
    announced = announcement(address, manifest, held, generation=generation)
    return run_host.on_checkpoint_announced(peer, announced, KEY.public_key)


LATER = AnnouncementReply(retry_later=True)


def tell_all(run_host, step, generation=1, **changes):
    """All announce the step, the last one as the first to be told to send."""
    manifest = manifest_of(run_host, step, **changes)
    assert tell(run_host, "a", generation, manifest) == LATER
    assert tell(run_host, "b", generation, manifest).wanted


def logged(config):
    lines = (config.job.dump_folder / COMMIT_LOG_FILE).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Commit) for line in lines]


def arrive(run_host, step, names):
    """Files of the first checkpoint as those of a later step, of which we only want to see how they arrive."""
    for name in names:
        sender = next(peer for peer in "ab" if name in run_host.ledger.wanted(peer, step))
        accepted = run_host.accept(sender, f"{step_folder(step)}/{name}")
        accepted.target.write_bytes((run_host.checkpoints.folder / "step-00000000" / name).read_bytes())
        run_host.on_file_saved(sender, f"{step_folder(step)}/{name}")


def test_a_slow_line_gets_its_checkpoint_through_before_a_newer_one_begins(run_host):
    begin(run_host)
    first, *rest = run_host.newest.manifest.files
    tell_all(run_host, 4)
    arrive(run_host, 4, [first])
    assert tell(run_host, "a", 1, manifest_of(run_host, 8)) == LATER
    arrive(run_host, 4, rest)
    assert run_host.newest.manifest.step == 4
    assert tell(run_host, "b", 1, manifest_of(run_host, 8)).wanted


def test_a_checkpoint_that_all_have_left_behind_gives_way(run_host):
    begin(run_host)
    tell_all(run_host, 4)
    tell_all(run_host, 8)
    assert run_host.ledger.pending_step == 8


def test_a_checkpoint_that_somebody_does_not_upload_is_given_up_and_the_peer_is_named(run_host, monkeypatch):
    begin(run_host)
    tell_all(run_host, 4)
    arrive(run_host, 4, run_host.ledger.wanted("a", 4))
    assert run_host.check_commits() == []
    monkeypatch.setattr(training_host, "MAX_UPLOAD_SECONDS", 0.0)
    (abandoned,) = run_host.check_commits()
    assert abandoned.reason.startswith("b has not uploaded blocks.1.safetensors, ")
    assert abandoned.reason.endswith(" of step 4")
    assert run_host.ledger.pending_step is None
    tell_all(run_host, 8)


def test_a_file_of_an_older_checkpoint_does_not_count_for_a_newer_one(run_host):
    """Its last piece may have been written while the newer one began."""
    begin(run_host)
    tell_all(run_host, 4)
    tell_all(run_host, 8)
    for name in run_host.newest.manifest.files:
        for peer in "ab":
            run_host.on_file_saved(peer, f"step-00000004/{name}")
    assert run_host.newest.manifest.step == 0


def commit(run_host, step, generation=1, **changes):
    tell_all(run_host, step, generation, **changes)
    arrive(run_host, step, list(run_host.newest.manifest.files))
    assert run_host.committed == step


def test_every_commit_is_in_the_log_once_with_what_it_is_and_who_has_it(run_host, run_config):
    begin(run_host)
    commit(run_host, 4)
    assert tell(run_host, "b", 1, run_host.newest.manifest) == AnnouncementReply(), "it is there"
    assert run_host.accept("b", "step-00000004/run.safetensors").target == run_host.newest.path / "run.safetensors"
    commit(run_host, 8)
    begin(run_host, 2)
    commit(run_host, 12, generation=2)
    found = logged(run_config)
    assert [(each.step, each.generation) for each in found] == [(4, 1), (8, 1), (12, 2)]
    for file, entry in run_host.newest.manifest.files.items():
        assert found[2].files[file] == entry.sha256
        assert found[2].holders[file] == [*(peer for peer in "ab" if file in run_host.ledger._held[peer]), "hub"]
    assert found[2].basis_sha256 == run_host.newest.manifest.basis_sha256


def test_what_is_committed_does_not_change(run_host):
    begin(run_host)
    commit(run_host, 4)
    other = manifest_of(run_host, 4, basis_version=77)
    assert "step 4 is already committed with different contents" in tell(run_host, "a", 1, other).refusal
    not_of_it = "the checkpoint is not of the current generation"
    assert tell(run_host, "c", 1, manifest_of(run_host, 8)).refusal == not_of_it
    begin(run_host, 2)
    assert tell(run_host, "a", 1, manifest_of(run_host, 8)).refusal == not_of_it


def test_files_come_from_the_peer_that_holds_their_layers(run_host):
    begin(run_host)
    assert run_host.ledger._held == {
        "a": {"first.safetensors", "blocks.0.safetensors", "run.safetensors"},
        "b": {f"{layer}.safetensors" for layer in ("blocks.1", "blocks.2", "blocks.3", "last", "run")},
    }
    tell_all(run_host, 4)
    sent = {
        peer: [
            name for name in sorted(run_host.newest.manifest.files) if run_host.accept(peer, f"step-00000004/{name}")
        ]
        for peer in "abc"
    }
    assert sent == {
        "a": ["blocks.0.safetensors", "first.safetensors", "run.safetensors"],
        "b": [f"{layer}.safetensors" for layer in ("blocks.1", "blocks.2", "blocks.3", "last")],
        "c": [],
    }


def test_files_of_others_in_an_announcement_are_left_out_and_the_peer_is_named(run_host, run_config):
    begin(run_host)
    manifest = manifest_of(run_host, 4)
    stolen = {"first.safetensors": FileEntry(nbytes=1, sha256="0" * 64)}
    lie = msgspec.structs.replace(manifest, files=manifest.files | stolen)
    held = run_host.ledger._held["b"]
    assert tell(run_host, "b", 1, lie, [*held, "first.safetensors"]) == LATER
    assert tell(run_host, "a", 1, manifest).wanted
    arrive(run_host, 4, list(manifest.files))
    assert run_host.newest.manifest.files == manifest.files
    (named,) = events_of(run_config, FilesRefused)
    assert (named.peer, named.reason) == ("b", "b announces first.safetensors, which is a file of a")
    assert any("thinpipe kick" in line for line in run_host.pop_notices())


FALSE = {
    "step 4 is at sample 32, and not at 33": lambda part: msgspec.structs.replace(part, samples_seen=33),
    "b leaves out last.safetensors": lambda part: msgspec.structs.replace(
        part, files=[file for file in part.files if file.name != "last.safetensors"]
    ),
    "b names a file twice": lambda part: msgspec.structs.replace(part, files=[*part.files, part.files[0]]),
    "there is no step 13 in this run": lambda part: msgspec.structs.replace(part, step=13),
}


@pytest.mark.parametrize("reason", FALSE)
def test_what_no_honest_peer_announces_is_refused_and_the_peer_is_named(run_host, run_config, reason):
    begin(run_host)
    address = Address(url="", fingerprint="r", name="b", credentials=Credentials(seed=KEY.seed, jwt=""))
    announced = announcement(address, manifest_of(run_host, 4), run_host.ledger._held["b"])
    for _ in range(3):
        assert run_host.on_checkpoint_announced("b", FALSE[reason](announced), KEY.public_key).refusal == reason
    (named,) = events_of(run_config, FilesRefused)
    assert (named.peer, named.reason) == ("b", f"the checkpoint of b was refused: {reason}")


def test_a_part_that_changes_is_refused(run_host):
    begin(run_host)
    assert tell(run_host, "b", 1, manifest_of(run_host, 4)) == LATER
    other = tell(run_host, "b", 1, manifest_of(run_host, 4, basis_version=9))
    assert other.refusal == "b has announced step 4 before, with other contents"


def test_a_step_announced_far_ahead_keeps_nobody_from_committing_and_shows_who_it_was(run_host):
    begin(run_host)
    assert tell(run_host, "b", 1, manifest_of(run_host, 12)) == LATER
    assert tell(run_host, "a", 1, manifest_of(run_host, 4)) == LATER
    assert run_host.ledger.owed() == "announced so far: a step 4, b step 12"
    assert tell(run_host, "b", 1, manifest_of(run_host, 4)).wanted


def test_who_made_a_file_can_be_shown_later(run_host):
    begin(run_host)
    commit(run_host, 4)
    record = msgspec.json.decode((run_host.newest.path / COMMIT_FILE).read_bytes(), type=SignedCommit)
    assert {name: maker.peer for name, maker in record.makers.items()} == {
        name: "a" if name in run_host.ledger._held["a"] else "b" for name in record.files
    }
    assert run_host.find(f"step-00000004/{COMMIT_FILE}") == run_host.newest.path / COMMIT_FILE


def test_a_crash_before_a_line_of_the_log_is_mended_at_the_next_start(run_host, run_config):
    begin(run_host)
    commit(run_host, 4)
    commit(run_host, 8)
    run_host.close()
    path = run_config.job.dump_folder / COMMIT_LOG_FILE
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 20, whole.index(b"\n") + 1):
        path.write_bytes(whole[:cut])
        host(run_config).close()
        assert path.read_bytes() == whole


def test_a_checkpoint_that_the_hub_has_lost_is_taken_again_but_not_logged_again(run_host, run_config):
    begin(run_host)
    commit(run_host, 4)
    commit(run_host, 8)
    run_host.close()
    (run_host.newest.path / "run.safetensors").unlink()
    again = host(run_config)
    assert (again.committed, list(again.missing)) == (8, ["run.safetensors"])
    rolled_back = again.roll_back(present=["b"], absent=["a"])
    assert (rolled_back.lost_step, rolled_back.step) == (8, 4)
    assert "copies at a, b" in rolled_back.reason or "copies at a, not connected" in rolled_back.reason
    assert again.committed == 4
    begin(again, 2)
    commit(again, 8, generation=2)
    again.close()
    assert [each.step for each in logged(run_config)] == [4, 8]
    assert again.pop_notices() == []


def lose_the_last_step_and_fall_back(config):
    """It was the last of the run."""
    run_host = host(config)
    begin(run_host)
    commit(run_host, 8)
    commit(run_host, 12)
    (run_host.newest.path / "run.safetensors").unlink()
    run_host.close()
    again = host(config)
    assert again.roll_back(present=["b"], absent=["a"]).step == 8
    begin(again, 2)
    return again


def test_what_was_given_up_and_is_computed_otherwise_is_committed_and_the_run_ends(run_config):
    again = lose_the_last_step_and_fall_back(run_config)
    assert again.ended == ""
    commit(again, 12, generation=2, basis_version=77)
    assert again.ended.startswith("finished")
    (told,) = again.pop_notices()
    assert told.startswith("step 12 was committed before, its files were lost")
    again.close()
    first, lost, other = logged(run_config)
    assert [each.step for each in (first, lost, other)] == [8, 12, 12]
    assert (lost.replaces, other.replaces) == ("", lost.sha256)
    later = host(run_config)
    assert (later.committed, later.pop_notices()) == (12, [])
    later.close()


def test_a_crash_before_the_line_that_replaces_another_is_mended_too(run_config):
    again = lose_the_last_step_and_fall_back(run_config)
    commit(again, 12, generation=2, basis_version=77)
    again.close()
    path = run_config.job.dump_folder / COMMIT_LOG_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    later = host(run_config)
    assert len(later.pop_notices()) == 1
    later.close()
    assert path.read_bytes() == whole


def test_what_was_given_up_is_not_looked_for_again(run_config):
    lose_the_last_step_and_fall_back(run_config).close()
    later = host(run_config)
    assert (later.committed, later.missing, later.pop_notices()) == (8, {}, [])
    later.close()


@pytest.mark.parametrize("left", ["nothing", "files", "no folder at all"])
def test_a_commit_whose_folder_or_manifest_is_gone_is_asked_for(run_host, run_config, left, tmp_path):
    begin(run_host)
    commit(run_host, 4)
    commit(run_host, 8)
    run_host.close()
    shutil.copytree(run_host.newest.path, tmp_path / "peer")
    files = dict.fromkeys(run_host.newest.manifest.files)
    if left == "files":
        (run_host.newest.path / MANIFEST).write_text("{")
        files = {}
    else:
        shutil.rmtree(run_host.newest.path if left == "nothing" else run_host.checkpoints.folder)
    again = host(run_config)
    assert (again.committed, again.missing.keys()) == (8, files.keys())
    assert again.newest.manifest == run_host.newest.manifest
    assert f"restored from {run_config.job.dump_folder / 'newest_manifest.json'}" in again.pop_notices()[-1]
    for name in list(again.missing):
        shutil.copy(tmp_path / "peer" / name, again.accept("a", f"step-00000008/{name}").target)
        again.on_file_saved("a", f"step-00000008/{name}")
    begin(again, 2)
    assert tell(again, "a", 2, again.newest.manifest) == AnnouncementReply(), "it is committed"
    again.checkpoints.open(8)
    again.close()
    assert [each.step for each in logged(run_config)] == [4, 8]


DAMAGES = {
    "torn": lambda data: data[:-9],
    "no UTF-8": lambda data: data.replace(b'"files":{"', b'"files":{"\xff'),
}


def test_a_commit_record_that_is_damaged_is_written_anew(run_host, run_config):
    begin(run_host)
    commit(run_host, 4)
    run_host.close()
    record, log = run_host.newest.path / COMMIT_FILE, run_config.job.dump_folder / COMMIT_LOG_FILE
    record.write_bytes(DAMAGES["no UTF-8"](record.read_bytes()))
    log.write_bytes(b"")  # as after a crash before the append
    again = host(run_config)
    assert again.commit_log.history.last.step == 4
    again.close()


@pytest.mark.parametrize("damage", ["gone", *DAMAGES, "of a step that was not committed"])
def test_a_commit_of_which_nothing_is_left_is_missed_aloud(run_host, run_config, damage):
    begin(run_host)
    commit(run_host, 4)
    commit(run_host, 8)
    run_host.close()
    shutil.rmtree(run_host.newest.path)
    kept = run_config.job.dump_folder / "newest_manifest.json"
    if damage == "gone":
        kept.unlink()
    else:
        change = DAMAGES.get(damage, lambda _: msgspec.json.encode(manifest_of(run_host, 12)))
        assert change(kept.read_bytes()) != kept.read_bytes()
        kept.write_bytes(change(kept.read_bytes()))
    again = host(run_config)
    assert again.committed == 4
    words = "step 8 is in commits.jsonl, but its checkpoint is missing (copies at a, b): continuing from step 4"
    assert again.pop_notices() == [words]
    again.close()
    later = host(run_config)
    assert later.pop_notices() == [], "it was said"
    later.close()


def test_a_checkpoint_that_can_never_be_whole_is_not_taken(run_host):
    begin(run_host)
    tell_all(run_host, 4)
    first = "step-00000004/first.safetensors"
    assert run_host.accept("a", first) is not None
    run_host.drop_peer("b")
    assert run_host.accept("a", first) is None
    assert tell(run_host, "a", 1, manifest_of(run_host, 4)).refusal == "b left before uploading its part of step 4"
    assert run_host.refusals == [], "that is nobody's lie"


def test_a_full_disk_leaves_the_newest_as_it_was(run_host):
    begin(run_host)
    commit(run_host, 4)
    log, good = run_host.commit_log, run_host.commit_log._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        log._file = full
        tell_all(run_host, 8)
        arrive(run_host, 8, list(run_host.newest.manifest.files))
    log._file = good
    assert run_host.committed == 4
    assert "the hub cannot write" in run_host.display.console.file.getvalue()
    commit(run_host, 8)
    assert (log.history.last.step, log.history.sha256(4) != "") == (8, True)


@pytest.mark.parametrize("reason", ["signal", "not_saved", "finished"])
def test_a_run_has_ended_when_its_last_step_is_committed_and_not_when_a_generation_ends(run_host, reason):
    begin(run_host)
    run_host.on_event(Stopped(step=12, reason=reason))
    assert run_host.ended == ""
    commit(run_host, 12)
    assert run_host.ended.startswith("finished")


def test_paths_of_peers_stay_with_them(run_config):
    """Neither the hub's console nor its log has them; it says where it has the checkpoint itself."""
    console = Console(file=io.StringIO(), width=300)
    with closing(TrainingHost(run_config, LineDisplay(console, log_freq=1))) as run_host:
        settings = {"config": "", "parameters": 1, "versions": {}}
        run_host.on_event(Started(step=4, resumed_from="joined/ada/checkpoints/step-00000004", **settings))
        run_host.on_event(Saved(step=8, path="joined/ada/checkpoints/step-00000008", nbytes=1, seconds=1.0))
    folder = run_config.job.dump_folder / "checkpoints"
    assert f"resumed from {folder / step_folder(4)}" in console.file.getvalue()
    assert "saved" not in console.file.getvalue()
    assert "joined" not in events_path(run_config.job.dump_folder).read_text()


@pytest.mark.parametrize("lie", [1e-6, 1e6])
def test_no_peer_alone_decides_how_long_a_step_takes(lie, run_host):
    """With a millionth of a second the next generation never committed, with a million no alarm said so."""
    begin(run_host)
    began = time.monotonic()
    run_host._step_seconds.begin(1.0)
    for number in range(1, 9):
        time.sleep(0.05)
        run_host.on_event(Step(step=number, loss=1, grad_norm=1, lr=1e-3, tokens=1, seconds=lie, tokens_per_second=1))
    assert 0.005 < run_host._step_seconds.known <= time.monotonic() - began
