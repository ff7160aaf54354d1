"""An invite is read back as it was written, survives a mail program, and a damaged one says what to do."""

import base64

import pytest
from msgspec.structs import replace

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.authority import Authority, AuthoritySeeds
from thinpipe.swarm.protocol.invite import GRACE_SECONDS, Invite
from thinpipe.swarm.protocol.jwt import is_jwt_signed_by, signature_of
from thinpipe.swarm.protocol.keys import KeyPair


@pytest.fixture
def invite():
    pair, authority = KeyPair.new(), Authority(AuthoritySeeds.new())
    return Invite(
        url="tls://203.0.113.7:4222",
        run="books",
        fingerprint="ab" * 32,
        id="i1",
        seed=pair.seed,
        account=authority.account,
        issuer=authority.invite_issuer,
        expires=1_800_000_000,
        signature=signature_of(authority.invite_jwt("i1", pair.public_key, 1_800_000_000 + GRACE_SECONDS)),
    )


def test_the_jwt_that_was_left_out_is_put_together_again(invite):
    """As its text is part of what the signature is of: whoever changes it changes the prefix of invites."""
    assert is_jwt_signed_by(Invite.read(invite.line()).credentials.jwt, invite.issuer)
    payload = base64.urlsafe_b64decode(invite.credentials.jwt.split(".")[1] + "==")
    key, public = invite.issuer, KeyPair.from_seed(invite.seed).public_key
    assert payload.decode() == (
        f'{{"exp":1802592000,"iat":1,"iss":"{key}","name":"i1",'
        f'"nats":{{"issuer_account":"{invite.account}","type":"user","version":2}},"sub":"{public}"}}'
    )


def test_it_is_short_enough_to_paste(invite):
    assert len(invite.line()) < 400


def test_the_line_reads_back(invite):
    assert Invite.read(invite.line()) == invite
    broken = f"  {invite.line()[:70]}\n  {invite.line()[70:]}\n"
    assert Invite.read(broken) == invite


def test_the_seed_is_not_shown_by_accident(invite):
    assert invite.seed not in repr(invite)
    assert invite.seed not in str(invite)


def test_every_lost_or_changed_character_is_noticed(invite):
    line = invite.line()
    for place in range(len("thinpipe3:"), len(line)):
        other = "A" if line[place] != "A" else "B"
        for damaged in (line[:place], line[:place] + other + line[place + 1 :], line[:place] + line[place + 1 :]):
            with pytest.raises(UserError, match="damaged"):
                Invite.read(damaged)


@pytest.mark.parametrize("line", ["", "hello", "thinpipe3:AAAA", "x" * 5000])
def test_what_is_no_invite_says_where_to_find_one(line):
    with pytest.raises(UserError, match="thinpipe hub"):
        Invite.read(line)


def test_an_invite_of_another_version_says_so(invite):
    old = invite.line().replace("thinpipe3:", "thinpipe1:")
    assert Invite.is_invite(old)
    with pytest.raises(UserError, match=r"begins with 'thinpipe1:', .* reads 'thinpipe3:': install the hub's"):
        Invite.read(old)


def test_its_words_are_plain_text(invite):
    """They are printed before anything is known of who made the invite."""
    shown = Invite.read(replace(invite, run="books\x1b[2J\nthinpipe: your key").line())
    assert shown.run == "books [2J thinpipe: your key"
    with pytest.raises(UserError, match="this invite is damaged"):
        Invite.read(replace(invite, url="tls://203.0.113.7:4222/\x1b[2J").line())
