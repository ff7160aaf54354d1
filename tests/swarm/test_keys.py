import nkeys
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.core.errors import UserError
from thinpipe.swarm.protocol.keys import KeyPair, is_public_key

PAIR = KeyPair.from_seed(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode())


def test_a_pair_comes_back_from_its_seed():
    assert KeyPair.from_seed(PAIR.seed) == PAIR
    assert PAIR.seed.startswith("SU")
    assert is_public_key(PAIR.public_key)
    assert KeyPair.new() != PAIR


def test_a_pair_does_not_show_its_seed():
    assert PAIR.seed not in repr(PAIR)


@given(st.integers(0, 55), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_one_wrong_letter_is_noticed(place, letter):
    text = PAIR.public_key[:place] + letter + PAIR.public_key[place + 1 :]
    assert is_public_key(text) == (text == PAIR.public_key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        PAIR.seed,
        PAIR.public_key + "\n",
        " " + PAIR.public_key,
        PAIR.public_key.lower(),
        PAIR.public_key[:-1],
        PAIR.public_key + "====",
        PAIR.public_key.replace(PAIR.public_key[5], "Ⅴ"),
        "U" * 56,
    ],
)
def test_what_is_nearly_a_key_is_none(text):
    assert not is_public_key(text)


@pytest.mark.parametrize("kind", [nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_SERVER, nkeys.PREFIX_BYTE_OPERATOR])
def test_keys_of_other_kinds_are_refused(kind):
    seed = nkeys.encode_seed(bytes(32), kind)
    assert not is_public_key(nkeys.from_seed(bytearray(seed)).public_key.decode())
    with pytest.raises(UserError, match="SU"):
        KeyPair.from_seed(seed.decode())


@given(st.text(max_size=70) | st.text("SUABCDEF234567", min_size=50, max_size=60))
def test_any_other_text_is_no_seed_and_no_key(text):
    assert not is_public_key(text)
    with pytest.raises(UserError, match="SU"):
        KeyPair.from_seed(text)
