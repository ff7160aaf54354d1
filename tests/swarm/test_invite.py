"""An invite is read back as it was written, survives a mail program, and a damaged one says what to do."""

import pytest

from thinpipe.core.errors import UserError
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.keys import KeyPair


@pytest.fixture
def invite():
    seed = KeyPair.new().seed
    return Invite(url="tls://203.0.113.7:4222", run="books", fingerprint="ab" * 32, id="i1", seed=seed)


def test_the_line_reads_back(invite):
    assert Invite.read(invite.line()) == invite
    broken = f"  {invite.line()[:70]}\n  {invite.line()[70:]}\n"
    assert Invite.read(broken) == invite


def test_the_seed_is_not_shown_by_accident(invite):
    assert invite.seed not in repr(invite)
    assert invite.seed not in str(invite)


def test_every_lost_or_changed_character_is_noticed(invite):
    line = invite.line()
    for place in range(len("thinpipe2:"), len(line)):
        other = "A" if line[place] != "A" else "B"
        for damaged in (line[:place], line[:place] + other + line[place + 1 :], line[:place] + line[place + 1 :]):
            with pytest.raises(UserError, match="damaged"):
                Invite.read(damaged)


@pytest.mark.parametrize("line", ["", "hello", "thinpipe2:AAAA", "x" * 5000])
def test_what_is_no_invite_says_where_to_find_one(line):
    with pytest.raises(UserError, match="thinpipe hub"):
        Invite.read(line)


def test_an_invite_of_another_version_says_so(invite):
    old = invite.line().replace("thinpipe2:", "thinpipe1:")
    assert Invite.is_invite(old)
    with pytest.raises(UserError, match=r"begins with 'thinpipe1:', .* reads 'thinpipe2:': install the hub's"):
        Invite.read(old)
