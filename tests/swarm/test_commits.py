"""One commit of a step, ever: who must have told what, what is refused, and what a crash leaves of the log."""

import time

import msgspec
import pytest

from thinpipe.core.errors import UserError
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory, CommitState
from thinpipe.swarm.hub.commits.ledger import CommitLedger, FalsePartError, Part
from thinpipe.swarm.hub.commits.log import CommitLog
from thinpipe.swarm.protocol.signed_files import SignedFile

HELD = {"a": ["first", "run"], "b": ["last", "run"]}


def state(step, **changes):
    files = {"first": f"f{step}", "last": f"l{step}", "run": f"r{step}"}
    made = CommitState(step=step, samples_seen=4 * step, basis_version=1, basis_sha256="u", files=files)
    return msgspec.structs.replace(made, **changes)


def part(peer, what):
    """What a peer announces of a state; all of it, if it holds nothing."""
    signed = {
        name: SignedFile(name=name, nbytes=1, sha256=sha256, signature=b"")
        for name, sha256 in what.files.items()
        if name in HELD.get(peer, what.files)
    }
    return Part(
        step=what.step,
        samples_seen=what.samples_seen,
        basis_version=what.basis_version,
        basis_sha256=what.basis_sha256,
        files=signed,
    )


def ledger(records=(), newest=0, generation=1):
    commits = CommitLedger(CommitHistory(records), newest=newest)
    commits.begin(generation, HELD)
    return commits


def tell(commits, peer, generation, what, now=0.0):
    return commits.announce(peer, generation, part(peer, what), now)


def commit(commits, step, generation=1, **changes):
    for name in ("a", "b"):
        tell(commits, name, generation, state(step, **changes))
    for name, file in (("a", "first"), ("b", "last"), ("a", "run")):
        assert file in commits.wanted(name, step)
        commits.on_file_received(name, step, file)
    found = commits.complete
    commits.mark_committed(found)
    return found


def read(path):
    return [msgspec.json.decode(line, type=Commit) for line in path.read_bytes().splitlines()]


def test_all_must_tell_and_every_file_must_come_from_who_holds_it():
    commits = ledger()
    assert tell(commits, "a", 1, state(4)) == "retry"
    assert tell(commits, "b", 1, state(4)) == "begin"
    assert tell(commits, "a", 1, state(4)) == "send"
    assert (commits.wanted("a", 4), commits.wanted("b", 4)) == (["first", "run"], ["last"])
    for file in ("first", "run"):
        commits.on_file_received("b", 4, file)
    assert commits.wanted("a", 4) == ["first", "run"], "they are not b's to give"
    for file in ("first", "run"):
        commits.on_file_received("a", 4, file)
    assert commits.complete is None
    assert commits.owed() == "b has not uploaded last of step 4"
    commits.on_file_received("b", 4, "last")
    assert commits.complete.holders == {"first": ["a", "hub"], "last": ["b", "hub"], "run": ["a", "b", "hub"]}
    assert commits.complete.state == state(4)
    assert {name: peer for name, (peer, _) in commits.signed_files.items()} == {"first": "a", "last": "b", "run": "a"}


def test_what_is_there_is_not_asked_for_again_and_does_not_change():
    commits = ledger()
    commit(commits, 4)
    assert tell(commits, "a", 1, state(4)) == "committed"
    assert (commits.complete, commits.pending_step) == (None, None)
    for other in (state(4, samples_seen=0), state(4, files={"first": "x", "last": "l4", "run": "r4"})):
        with pytest.raises(UserError, match="step 4 is already committed with different contents"):
            tell(commits, "a", 1, other)
    with pytest.raises(UserError, match="there is a newer checkpoint, of step 4"):
        tell(commits, "a", 1, state(3))


def test_nobody_announces_what_it_does_not_hold_or_leaves_out_what_it_does():
    commits = ledger()
    everything = part("c", state(4))
    assert commits.foreign_files("a", everything.files) == {"last": ["b"]}
    assert commits.foreign_files("a", ["more"]) == {"more": []}
    with pytest.raises(FalsePartError, match="a announces files of others"):
        commits.announce("a", 1, everything, 0.0)
    with pytest.raises(FalsePartError, match="a leaves out run"):
        tell(commits, "a", 1, state(4, files={"first": "f4"}))
    assert tell(commits, "a", 1, state(4)) == "retry"
    with pytest.raises(FalsePartError, match="a has announced step 4 before, with other contents"):
        tell(commits, "a", 1, state(4, basis_version=2))


def test_who_is_gone_before_it_told_keeps_nobody_busy():
    commits = ledger()
    assert tell(commits, "a", 1, state(4)) == "retry"
    commits.drop_peer("b")
    with pytest.raises(UserError, match="b left before uploading its part of step"):
        tell(commits, "a", 1, state(4))
    commits.begin(2, {"a": ["first", "run"], "c": ["last", "run"]})
    assert tell(commits, "a", 2, state(8)) == "retry"


def test_who_is_gone_before_its_files_came_keeps_nobody_busy():
    commits = ledger()
    for name in ("a", "b"):
        tell(commits, name, 1, state(4))
    commits.drop_peer("b")
    assert commits.pending_step is None
    assert commits.expected("a", 4, "first") is None, "it can never be whole"


def test_who_is_gone_after_its_files_came_is_not_needed_any_more():
    commits = ledger()
    for name in ("a", "b"):
        tell(commits, name, 1, state(4))
    commits.on_file_received("b", 4, "last")
    commits.drop_peer("b")
    assert tell(commits, "a", 1, state(4)) == "send"
    for file in ("first", "run"):
        commits.on_file_received("a", 4, file)
    assert commits.complete.state == state(4)


def test_what_all_have_comes_from_another_when_its_sender_is_gone():
    commits = ledger()
    for name in ("a", "b"):
        tell(commits, name, 1, state(4))
    commits.on_file_received("a", 4, "first")
    commits.drop_peer("a")
    assert commits.wanted("b", 4) == ["last", "run"]
    for file in ("last", "run"):
        commits.on_file_received("b", 4, file)
    assert commits.complete.state == state(4)


@pytest.mark.parametrize(("peer", "generation"), [("c", 2), ("a", 1), ("a", 3)])
def test_who_is_not_of_the_generation_is_not_heard(peer, generation):
    commits = ledger(generation=2)
    with pytest.raises(UserError, match="not of the current generation"):
        tell(commits, peer, generation, state(4))
    for name in ("a", "b"):
        tell(commits, name, 2, state(4))
    assert commits.expected("c", 4, "first") is None
    commits.on_file_received("c", 4, "first")
    assert commits.wanted("a", 4) == ["first", "run"]


@pytest.mark.parametrize(
    "change", [{"samples_seen": 1}, {"basis_sha256": "v"}, {"files": {"first": "f4", "last": "l4", "run": "other"}}]
)
def test_those_who_differ_in_what_all_have_make_no_commit_and_are_named(change):
    commits = CommitLedger()
    held = HELD | {"c": ["run"]}
    commits.begin(1, held)
    honest = {name: part(name, state(4)) for name in ("a", "b")}
    whole = part("c", state(4, **change))
    other = Part(**vars(whole) | {"files": {"run": whole.files["run"]}})
    for name in ("a", "b"):
        assert commits.announce(name, 1, honest[name], 0.0) == "retry"
    text = "c announced another basis, data position or run file of step 4 than a and b"
    with pytest.raises(UserError, match=text):
        commits.announce("c", 1, other, 0.0)
    assert (commits.pending_step, commits.owed()) == (None, text)


def test_a_new_generation_gives_up_what_was_on_its_way_and_generations_only_grow():
    commits = ledger(generation=2)
    for name in ("a", "b"):
        tell(commits, name, 2, state(4))
    with pytest.raises(ValueError, match="generation 2 cannot follow generation 2"):
        commits.begin(2, HELD)
    commits.begin(3, HELD)
    assert commits.pending_step is None
    assert tell(commits, "a", 3, state(4, samples_seen=1)) == "retry", "it was not committed"


def test_a_slow_line_is_waited_for_but_not_for_ever():
    commits = ledger()
    for name in ("a", "b"):
        tell(commits, name, 1, state(4))
    for file in ("first", "run"):
        commits.on_file_received("a", 4, file)
    assert tell(commits, "a", 1, state(8)) == "retry"
    limits = {"a": 1.0, "b": 20.0}
    commits.abandon_overdue(19.0, limits, 0.0)
    assert (commits.pending_step, commits.pop_abandoned()) == (4, None), "a owes nothing"
    commits.abandon_overdue(21.0, limits, 0.0)
    assert (commits.pending_step, commits.owed()) == (None, "announced so far: a step 8; nothing by b")
    assert commits.pop_abandoned() == ({"b"}, "b has not uploaded last of step 4")
    assert commits.pop_abandoned() is None
    assert tell(commits, "b", 1, state(8), 30.0) == "begin"


def test_what_all_have_left_behind_gives_way():
    commits = ledger()
    for step in (4, 8):
        answers = [tell(commits, name, 1, state(step)) for name in ("a", "b")]
        assert answers == ["retry", "begin"]
        commits.on_file_received("b", step, "last")
    assert commits.pending_step == 8
    assert commits.pop_abandoned() == ({"a"}, "a has not uploaded first, run of step 4")


def test_what_the_hub_has_lost_is_taken_again_and_is_the_same_commit():
    first = commit(ledger(), 4)
    commits = ledger([first], newest=2, generation=2)
    again = commit(commits, 4, generation=2)
    assert commits.is_recorded(again)
    assert (again.generation, again.replaces, commits.newest) == (2, "", 4)
    assert commits.holders_of(["first", "run"]) == {"first": ["a"], "run": ["a", "b"]}


def test_what_the_hub_has_lost_and_is_computed_otherwise_takes_its_place_and_says_so():
    first = commit(ledger(), 4)
    commits = ledger([first], newest=4, generation=2)
    with pytest.raises(UserError, match="step 4 is already committed with different contents"):
        tell(commits, "a", 2, state(4, basis_version=2))
    commits.roll_back(2)
    again = commit(commits, 4, generation=2, basis_version=2)
    assert again.replaces == first.sha256 != again.sha256
    with pytest.raises(UserError, match="step 4 is already committed with different contents"):
        tell(commits, "a", 2, first.state)


def test_of_old_commits_only_a_hash_is_kept():
    history = CommitHistory((Commit.of(state(step), 1, {}) for step in range(1, 100)), max_records=3)
    assert [step for step in range(101) if history.record(step)] == [97, 98, 99]
    assert history.last == history.record(99)
    assert history.sha256(5) == state(5).sha256
    with pytest.raises(ValueError, match="step 5 is committed already"):
        history.add(Commit.of(state(5, basis_version=7), 2, {}))
    history.add(Commit.of(state(5, basis_version=7), 2, {}, state(5).sha256))
    assert history.sha256(5) == state(5, basis_version=7).sha256


def test_the_log_keeps_what_was_written_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "log" / "commits.jsonl"
    records = [Commit.of(state(step), 1, {"first": ["b", "a"]}) for step in (2, 4, 6)]
    log = CommitLog(path)
    log.open()
    for record in records:
        log.append(record)
    with pytest.raises(ValueError, match="step 4 is committed already"):
        log.append(records[1])
    log.close()
    assert read(path) == records
    assert records[0].holders == {"first": ["a", "b", "hub"], "last": ["hub"], "run": ["hub"]}
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        log = CommitLog(path)
        log.open()
        log.close()
        assert log.history.last == [None, *records][sum(end <= cut for end in ends)]
        assert path.read_bytes() == whole[: max([0, *(end for end in ends if end <= cut)])]


def test_a_log_that_is_wrong_before_its_end_is_not_used(tmp_path):
    path = tmp_path / "commits.jsonl"
    line = msgspec.json.encode(Commit.of(state(2), 1, {})) + b"\n"
    path.write_bytes(b"{}\n" + line)
    with pytest.raises(UserError, match=r"line 1 of .* is damaged"):
        CommitLog(path)
    path.write_bytes(line + line)
    with pytest.raises(UserError, match=r"line 2 of .*: step 2 is committed already"):
        CommitLog(path)
    path.write_bytes(line + bytes(50))
    assert CommitLog(path).history.last.step == 2


def test_bytes_that_are_no_utf8_are_read_as_damage(tmp_path):
    path = tmp_path / "commits.jsonl"
    line = msgspec.json.encode(Commit.of(state(2), 1, {})) + b"\n"
    damaged = line.replace(b'"files":{"', b'"files":{"\xff')
    assert damaged != line
    path.write_bytes(damaged + line)
    with pytest.raises(UserError, match=r"line 1 of .*commits\.jsonl"):
        CommitLog(path)
    path.write_bytes(line + damaged)
    assert CommitLog(path).history.last.step == 2, "a crash may damage the last line"


def test_a_commit_that_takes_the_place_of_another_is_read_back(tmp_path):
    path = tmp_path / "commits.jsonl"
    first, other = Commit.of(state(2), 1, {}), Commit.of(state(2, samples_seen=9), 2, {}, state(2).sha256)
    log = CommitLog(path)
    log.open()
    with pytest.raises(ValueError, match="step 2 is committed already"):
        log.append(other)
    log.append(first)
    log.append(other)
    log.close()
    assert read(path) == [first, other]
    assert CommitLog(path).history.sha256(2) == other.sha256
    assert b"replaces" not in path.read_bytes().splitlines()[0]


def test_a_long_log_is_read_in_time_that_grows_with_its_length(tmp_path):
    lines = [msgspec.json.encode(Commit.of(state(step), 1, {})) + b"\n" for step in range(1, 40_001)]
    seconds = []
    for count in (4_000, 40_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"".join(lines[:count]))
        began = time.process_time()
        assert CommitLog(path, max_records=3).history.last.step == count
        seconds.append(time.process_time() - began)
    assert seconds[1] < 40 * seconds[0], seconds


def test_who_owes_hundreds_of_files_is_said_in_few_words():
    """Status holds it: a text that is too long for it would let nobody join."""
    files = [f"blocks.{number}.safetensors" for number in range(300)]
    commits = CommitLedger()
    commits.begin(1, {"anna": files})
    signed = {name: SignedFile(name=name, nbytes=1, sha256="0" * 64, signature=b"") for name in files}
    state = {"samples_seen": 1, "basis_version": None, "basis_sha256": None}
    assert commits.announce("anna", 1, Part(step=1, **state, files=signed), 0.0) == "begin"
    assert commits.owed().endswith(" and 295 more of step 1")
    assert len(commits.owed()) < 300
