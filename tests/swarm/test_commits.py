"""One commit of a step, ever: who must have told what, what is refused, and what a crash leaves of the log."""

import time

import msgspec
import pytest

from thinpipe.core.errors import UserError
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory, CommitState
from thinpipe.swarm.hub.commits.ledger import PENDING_IDLE_SECONDS, CommitLedger
from thinpipe.swarm.hub.commits.log import CommitLog

PARTS = {"a": ["first"], "b": ["last"]}


def state(step, **changes):
    files = {"first": f"f{step}", "last": f"l{step}"}
    made = CommitState(step=step, samples_seen=4 * step, basis_version=1, basis_sha256="u", files=files)
    return msgspec.structs.replace(made, **changes)


def ledger(records=(), newest=0, generation=1):
    commits = CommitLedger(CommitHistory(records), newest=newest)
    commits.begin(generation, ("a", "b"))
    return commits


def tell(commits, peer, generation, what, manifest_sha256, now):
    return commits.announce(peer, generation, what, PARTS.get(peer, []), manifest_sha256, now)


def commit(commits, step, generation=1, **changes):
    for name in ("a", "b"):
        tell(commits, name, generation, state(step, **changes), "", 0.0)
    for name, file in (("a", "first"), ("b", "last")):
        assert commits.expects(name, step, file, 0.0)
        commits.on_file_received(name, step, file)
    found = commits.complete
    commits.mark_committed(found)
    return found


def read(path):
    return [msgspec.json.decode(line, type=Commit) for line in path.read_bytes().splitlines()]


def test_all_must_tell_and_all_files_must_come():
    commits = ledger()
    assert tell(commits, "a", 1, state(4), "", 0.0) == "begin"
    commits.on_file_received("a", 4, "first")
    commits.on_file_received("a", 4, "last")
    assert commits.complete is None, "b has not told that it has its part"
    assert tell(commits, "b", 1, state(4), "", 0.0) == "send"
    assert commits.complete.holders == {"first": ["a", "hub"], "last": ["a", "hub"]}
    assert commits.complete.state == state(4)


def test_what_is_there_is_not_asked_for_again_and_does_not_change():
    commits = ledger()
    commit(commits, 4)
    assert tell(commits, "a", 1, state(4), "", 0.0) == "committed"
    assert (commits.complete, commits.pending_step) == (None, None)
    with pytest.raises(UserError, match="step 4 is already committed with different contents"):
        tell(commits, "a", 1, state(4, samples_seen=0), "", 0.0)
    with pytest.raises(UserError, match="there is a newer checkpoint, of step 4"):
        tell(commits, "a", 1, state(3), "", 0.0)


def test_who_is_gone_before_it_told_keeps_nobody_busy():
    commits = ledger()
    assert tell(commits, "a", 1, state(4), "", 0.0) == "begin"
    commits.drop_peer("b")
    assert commits.pending_step is None
    with pytest.raises(UserError, match="b left before uploading its part of step"):
        tell(commits, "a", 1, state(4), "", 0.0)
    commits.begin(2, ("a", "c"))
    assert tell(commits, "a", 2, state(8), "", 0.0) == "begin"


def test_who_is_gone_before_its_files_came_keeps_nobody_busy():
    commits = ledger()
    for name in ("a", "b"):
        tell(commits, name, 1, state(4), "", 0.0)
    commits.drop_peer("b")
    assert commits.pending_step is None
    assert not commits.expects("a", 4, "first", 0.0), "it can never be whole"


def test_who_is_gone_after_its_files_came_is_not_needed_any_more():
    commits = ledger()
    for name in ("a", "b"):
        tell(commits, name, 1, state(4), "", 0.0)
    commits.on_file_received("b", 4, "last")
    commits.drop_peer("b")
    assert tell(commits, "a", 1, state(4), "", 0.0) == "send"
    commits.on_file_received("a", 4, "first")
    assert commits.complete.state == state(4)


def test_files_of_one_that_is_gone_may_come_from_another_that_has_them():
    for files in (["first", "last"], ["first"]):
        commits = ledger()
        tell(commits, "b", 1, state(4), "", 0.0)
        commits.drop_peer("b")
        assert commits.pending_step == 4, "a has not told what it has"
        if "last" in files:
            assert commits.announce("a", 1, state(4), files, "", 0.0) == "send"
        else:
            with pytest.raises(UserError, match="no connected peer has last of step 4"):
                commits.announce("a", 1, state(4), files, "", 0.0)
            assert commits.pending_step is None


@pytest.mark.parametrize(("peer", "generation"), [("c", 2), ("a", 1), ("a", 3)])
def test_who_is_not_of_the_generation_is_not_heard(peer, generation):
    commits = ledger(generation=2)
    with pytest.raises(UserError, match="not of the current generation"):
        tell(commits, peer, generation, state(4), "", 0.0)
    tell(commits, "a", 2, state(4), "", 0.0)
    assert not commits.expects("c", 4, "first", 0.0)
    commits.on_file_received("c", 4, "first")
    tell(commits, "b", 2, state(4), "", 0.0)
    commits.on_file_received("b", 4, "last")
    assert commits.complete is None


@pytest.mark.parametrize("manifest_sha256", ["", "another"])
def test_two_that_differ_make_no_commit(manifest_sha256):
    commits = ledger()
    tell(commits, "a", 1, state(4), "", 0.0)
    with pytest.raises(UserError, match="another peer has announced different contents of step 4"):
        tell(commits, "b", 1, state(4, samples_seen=16 if manifest_sha256 else 1), manifest_sha256, 0.0)
    for file in ("first", "last"):
        commits.on_file_received("a", 4, file)
    assert commits.complete is None


def test_a_new_generation_gives_up_what_was_on_its_way_and_generations_only_grow():
    commits = ledger(generation=2)
    tell(commits, "a", 2, state(4), "", 0.0)
    with pytest.raises(ValueError, match="generation 2 cannot follow generation 2"):
        commits.begin(2, ("a", "b"))
    commits.begin(3, ("a", "b"))
    assert commits.pending_step is None
    assert tell(commits, "a", 3, state(4, samples_seen=1), "", 0.0) == "begin", "it was not committed"


def test_a_slow_line_is_waited_for_while_something_comes():
    commits = ledger()
    tell(commits, "a", 1, state(4), "", 0.0)
    assert tell(commits, "a", 1, state(8), "", PENDING_IDLE_SECONDS - 1) == "retry"
    assert commits.expects("a", 4, "first", PENDING_IDLE_SECONDS - 1)
    assert tell(commits, "a", 1, state(8), "", PENDING_IDLE_SECONDS + 1) == "retry"
    assert tell(commits, "a", 1, state(8), "", 2 * PENDING_IDLE_SECONDS) == "begin"
    assert tell(commits, "b", 1, state(12), "", 0.0) == "begin", "b will never send step 8"


def test_what_the_hub_has_lost_is_taken_again_and_is_the_same_commit():
    first = commit(ledger(), 4)
    commits = ledger([first], newest=2, generation=2)
    again = commit(commits, 4, generation=2)
    assert commits.is_recorded(again)
    assert (again.generation, again.replaces, commits.newest) == (2, "", 4)
    assert commits.holders_of(["first"]) == {"first": ["a"]}


def test_what_the_hub_has_lost_and_is_computed_otherwise_takes_its_place_and_says_so():
    first = commit(ledger(), 4)
    commits = ledger([first], newest=4, generation=2)
    with pytest.raises(UserError, match="step 4 is already committed with different contents"):
        tell(commits, "a", 2, state(4, basis_version=2), "", 0.0)
    commits.roll_back(2)
    again = commit(commits, 4, generation=2, basis_version=2)
    assert again.replaces == first.sha256 != again.sha256
    with pytest.raises(UserError, match="step 4 is already committed with different contents"):
        tell(commits, "a", 2, first.state, "", 0.0)


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
    assert records[0].holders == {"first": ["a", "b", "hub"], "last": ["hub"]}
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
    with pytest.raises(UserError, match=r"line 2 of .* commits step 2 a second time"):
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
