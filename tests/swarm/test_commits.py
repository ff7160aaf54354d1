"""One commit of a step, ever: who must have told what, what is refused, and what a crash leaves of the log."""

import msgspec
import pytest

from thinpipe.core.errors import UserError
from thinpipe.swarm.commit_log import CommitLog, read_commits
from thinpipe.swarm.commits import QUIET_SECONDS, Commit, Commits, State


def state(step, **changes):
    files = {"first": f"f{step}", "last": f"l{step}"}
    made = State(step=step, samples_seen=4 * step, basis_version=1, basis_sha256="u", files=files)
    return msgspec.structs.replace(made, **changes)


def ledger(records=(), newest=0, epoch=1):
    commits = Commits(records, newest=newest)
    commits.begin(epoch, ("a", "b"))
    return commits


def commit(commits, step, epoch=1):
    for name in ("a", "b"):
        commits.told(name, epoch, state(step), "", 0.0)
    for name, file in (("a", "first"), ("b", "last")):
        assert commits.expects(name, step, file, 0.0)
        commits.came(name, step, file)
    found = commits.whole
    commits.committed(found)
    return found


def test_all_must_tell_and_all_files_must_come():
    commits = ledger()
    assert commits.told("a", 1, state(4), "", 0.0) == "begin"
    commits.came("a", 4, "first")
    commits.came("a", 4, "last")
    assert commits.whole is None, "b has not told that it has its part"
    assert commits.told("b", 1, state(4), "", 0.0) == "send"
    assert commits.whole.holders == {"first": ["a", "hub"], "last": ["a", "hub"]}
    assert commits.whole.state == state(4)


def test_what_is_there_is_not_asked_for_again_and_does_not_change():
    commits = ledger()
    first = commit(commits, 4)
    assert commits.told("a", 1, state(4), "", 0.0) == "there"
    assert (commits.whole, commits.arriving, commits[4]) == (None, None, first)
    with pytest.raises(UserError, match="step 4 was committed in epoch 1 with other contents"):
        commits.told("a", 1, state(4, samples_seen=0), "", 0.0)
    with pytest.raises(UserError, match="there is a newer checkpoint, of step 4"):
        commits.told("a", 1, state(3), "", 0.0)


def test_who_is_gone_before_it_told_keeps_nobody_busy():
    commits = ledger()
    assert commits.told("a", 1, state(4), "", 0.0) == "begin"
    commits.gone("b")
    assert commits.arriving is None
    with pytest.raises(UserError, match="b left before it told its part"):
        commits.told("a", 1, state(4), "", 0.0)
    commits = ledger()
    for name in ("a", "b"):
        commits.told(name, 1, state(4), "", 0.0)
    commits.gone("b")
    assert commits.told("a", 1, state(4), "", 0.0) == "send", "it has told: its files may be there"
    commits.begin(2, ("a", "c"))
    assert commits.told("a", 2, state(8), "", 0.0) == "begin"


@pytest.mark.parametrize(("peer", "epoch"), [("c", 2), ("a", 1), ("a", 3)])
def test_who_is_not_of_the_epoch_is_not_heard(peer, epoch):
    commits = ledger(epoch=2)
    with pytest.raises(UserError, match="not of this epoch"):
        commits.told(peer, epoch, state(4), "", 0.0)
    commits.told("a", 2, state(4), "", 0.0)
    assert not commits.expects("c", 4, "first", 0.0)
    commits.came("c", 4, "first")
    commits.told("b", 2, state(4), "", 0.0)
    commits.came("b", 4, "last")
    assert commits.whole is None


@pytest.mark.parametrize("seal", ["", "another"])
def test_two_that_differ_make_no_commit(seal):
    commits = ledger()
    commits.told("a", 1, state(4), "", 0.0)
    with pytest.raises(UserError, match="another peer has told another checkpoint of step 4"):
        commits.told("b", 1, state(4, samples_seen=16 if seal else 1), seal, 0.0)
    for file in ("first", "last"):
        commits.came("a", 4, file)
    assert commits.whole is None


def test_a_new_epoch_gives_up_what_was_on_its_way_and_epochs_only_grow():
    commits = ledger(epoch=2)
    commits.told("a", 2, state(4), "", 0.0)
    with pytest.raises(ValueError, match="epoch 2 cannot follow epoch 2"):
        commits.begin(2, ("a", "b"))
    commits.begin(3, ("a", "b"))
    assert commits.arriving is None
    assert commits.told("a", 3, state(4, samples_seen=1), "", 0.0) == "begin", "it was not committed"


def test_a_slow_line_is_waited_for_while_something_comes():
    commits = ledger()
    commits.told("a", 1, state(4), "", 0.0)
    assert commits.told("a", 1, state(8), "", QUIET_SECONDS - 1) == "later"
    assert commits.expects("a", 4, "first", QUIET_SECONDS - 1)
    assert commits.told("a", 1, state(8), "", QUIET_SECONDS + 1) == "later"
    assert commits.told("a", 1, state(8), "", 2 * QUIET_SECONDS) == "begin"
    assert commits.told("b", 1, state(12), "", 0.0) == "begin", "b will never send step 8"


def test_what_the_hub_has_lost_is_taken_again_if_it_is_the_same():
    first = commit(ledger(), 4)
    commits = ledger([first], newest=2, epoch=2)
    with pytest.raises(UserError, match="with other contents"):
        commits.told("a", 2, state(4, basis_version=2), "", 0.0)
    again = commit(commits, 4, epoch=2)
    assert (again.epoch, commits[4], commits.newest) == (2, first, 4)


def test_the_log_keeps_what_was_written_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "log" / "commits.jsonl"
    records = [Commit.of(state(step), 1, {"first": ["b", "a"]}) for step in (2, 4, 6)]
    log = CommitLog(path)
    for record in records:
        log.append(record)
    with pytest.raises(ValueError, match="step 4 is committed already"):
        log.append(records[1])
    log.close()
    assert read_commits(path) == records
    assert records[0].holders == {"first": ["a", "b", "hub"], "last": ["hub"]}
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        log = CommitLog(path)
        log.close()
        assert log.records == records[: sum(end <= cut for end in ends)]
        assert path.read_bytes() == whole[: max([0, *(end for end in ends if end <= cut)])]


def test_a_log_that_is_wrong_before_its_end_is_not_used(tmp_path):
    path = tmp_path / "commits.jsonl"
    line = msgspec.json.encode(Commit.of(state(2), 1, {})) + b"\n"
    path.write_bytes(b"{}\n" + line)
    with pytest.raises(UserError, match=r"line 1 of .* cannot be read"):
        CommitLog(path)
    path.write_bytes(line + line)
    with pytest.raises(UserError, match=r"line 2 of .* commits step 2 again"):
        read_commits(path)
    path.write_bytes(line + bytes(50))
    assert [record.step for record in read_commits(path)] == [2]
