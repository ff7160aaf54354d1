"""The one door: whatever another machine sends is a message within its bounds, or refused with `ProtocolError`, and
what was accepted raises nothing where it is used."""

import ast
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec
import pytest
import tomli_w
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from msgspec import inspect

import thinpipe
from tests.foreign.cases import NASTY, cases, damaged, spoilt
from tests.foreign.doors import DOORS, SETTINGS, process_settings
from thinpipe.core.foreign import MAX_NBYTES, ProtocolError, decode_foreign, foreign_table
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.frame import PIECE, Header, Origin

SAMPLE, ALL = 60, 3000
"""Cases of each type: in every run, and 100,000 in all."""
SOURCES = Path(thinpipe.__file__).parent
READERS = (
    "boundary",
    "checkpoint",
    "pipeline",
    "swarm",
    "training",
    "transport",
    "doctor/hub.py",
    "cli/hub_commands.py",
)
"""Where something could come in."""
OWN_FILES = {
    "checkpoint/storage.py", "boundary/settings_tensor.py", "swarm/hub/commits/recovery.py",
    "training/launch.py",
    "swarm/hub/commits/store.py",  # its own manifest, to JSON and back
    "training/same_settings.py",  # its own settings, to TOML and back
    "training/recomputed_loss.py",  # settings in the hub's own checkpoints
    "swarm/hub/commit_losses.py",  # and what its own process prints
    "swarm/broker/server.py",  # replies of the server that it has started
    "swarm/broker/register.py",  # the hub's own list of members
    "swarm/peer/identity.py",  # the peer's own key
    "checkpoint/load.py", "checkpoint/state.py",  # settings in a checkpoint on this disk
}  # fmt: skip
"""Modules of these that decode without the door: files and processes of this machine."""


def fuzz(name, examples):
    """How many cases were made of each sort, and how many of them refused."""
    door, counts = DOORS[name], Counter()

    @seed(examples)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(cases(door.kind, door.form))
    def check(case):
        way, data = case
        counts[way] += 1
        try:
            message, refusal = decode_foreign(data, door.kind, form=door.form), None
        except ProtocolError as error:
            message, refusal = None, str(error)
        if refusal is not None:
            counts["refused", way] += 1
            assert refusal.isprintable()
            return
        assert all(map(str.isprintable, texts_of(message)))
        door.process(message)

    check()
    return counts


def texts_of(message):
    """All texts in a message that a person may see."""
    match message:
        case str():
            yield message
        case msgspec.Struct():
            for name in message.__struct_fields__:
                if name not in ("settings", "config", "run", "keys"):
                    yield from texts_of(getattr(message, name))
        case dict():
            for key, value in message.items():
                yield from texts_of(key)
                yield from texts_of(value)
        case list() | tuple():
            for value in message:
                yield from texts_of(value)


@pytest.mark.parametrize("name", DOORS)
def test_a_message_is_within_its_bounds_or_refused(name):
    counts = fuzz(name, SAMPLE)
    assert counts["valid"] > counts["refused", "valid"], "values that fit are accepted"


@pytest.mark.long
@pytest.mark.parametrize("name", DOORS)
def test_each_of_100_000_messages_is_within_its_bounds_or_refused(name):
    counts = fuzz(name, ALL)
    print(name, dict(counts))
    made = sum(number for way, number in counts.items() if isinstance(way, str))
    assert made >= 0.9 * ALL, "hypothesis makes fewer where there are no more"


def test_all_of_them_are_100_000():
    assert ALL * len(DOORS) >= 100_000


@pytest.mark.parametrize("examples", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_settings_of_a_hub_are_taken_or_refused(examples):
    @seed(examples)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def check(dice):
        table = SETTINGS
        for _ in range(dice.randrange(3)):
            table = spoilt(table, dice)
        try:
            text = tomli_w.dumps(table) if isinstance(table, dict) else str(table)
        except (TypeError, AttributeError, ValueError):  # TOML cannot say it
            return
        process_settings(text)
        with_damage = damaged(text.encode(errors="replace"), dice)
        process_settings(with_damage.decode(errors="replace"))
        try:
            foreign_table(with_damage)
        except ProtocolError:
            return

    check()


@pytest.mark.parametrize("examples", [2000, pytest.param(50_000, marks=pytest.mark.long)])
def test_frames_of_peers_are_read_or_refused(examples):
    dice = random.Random(examples)
    frame = Header(
        kind=PIECE, origin=Origin(run=b"test-run"), label=Label(step=1, microbatch=2), tag=3, sequence=4, length=5
    ).pack(b"abcde")
    for _ in range(examples):
        try:
            Header.unpack(damaged(frame, dice))
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "data",
    [b"", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"[" * 100_000, bytes(MAX_NBYTES + 1)],
    ids=["nothing", "deep", "huge map", "deep JSON", "long"],
)
def test_data_that_no_machine_sends_is_refused_for_every_type(data):
    for door in DOORS.values():
        with pytest.raises(ProtocolError):
            decode_foreign(data, door.kind, form=door.form)


def calls_of(*names):
    """Calls of these functions in the package: module, and the call."""
    for module, call in _calls():
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in names:
            yield module, call


@cache
def _calls():
    return [
        (path.relative_to(SOURCES).as_posix(), node)
        for path in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_every_type_that_is_decoded_is_fuzzed():
    decoded = {
        ast.unparse(call.args[1])
        for module, call in calls_of("decode_foreign")
        if module not in ("core/foreign.py", "swarm/hub/state_files.py")  # files of the hub itself
    }
    decoded -= {"kind"}  # of RequestPipeline, which reads ReadReply and WriteReply
    assert decoded | {"ReadReply", "WriteReply"} == DOORS.keys()


def test_nothing_of_another_machine_is_decoded_elsewhere():
    """A module that decodes by itself is named above, with what it reads."""
    decoders = re.compile(r"msgspec\.(json|msgpack)\.(decode|Decoder)|msgspec\.convert|(tomllib|json|pickle)\.loads?")
    own = {
        module
        for module, call in calls_of("decode", "Decoder", "convert", "load", "loads")
        if module.startswith(READERS) and decoders.fullmatch(ast.unparse(call.func))
    }
    assert own == OWN_FILES, "a new way in, or a file to be named above"


def leaves(info, path=""):
    match info:
        case inspect.Metadata():
            yield from leaves(info.type, path)
        case inspect.UnionType():
            for one in info.types:
                yield from leaves(one, path)
        case inspect.StructType():
            for field in info.fields:
                yield from leaves(field.type, f"{path}.{info.cls.__name__}.{field.name}")
        case inspect.ListType() | inspect.VarTupleType():
            yield path, info
            yield from leaves(info.item_type, f"{path}[]")
        case inspect.TupleType():
            for one in info.item_types:
                yield from leaves(one, path)
        case inspect.DictType():
            yield path, info
            yield from leaves(info.key_type, f"{path} key")
            yield from leaves(info.value_type, f"{path} value")
        case _:
            yield path, info


def has_bounds(info):
    match info:
        case inspect.IntType() | inspect.FloatType():
            return info.ge is not None and info.le is not None
        case inspect.StrType() if info.pattern is not None:
            return info.max_length is not None or not info.pattern.rstrip(r"\Z").endswith(("*", "+"))
        case inspect.StrType() | inspect.BytesType() | inspect.ListType() | inspect.DictType():
            return info.max_length is not None
    return isinstance(info, inspect.BoolType | inspect.NoneType | inspect.LiteralType | inspect.AnyType)


@pytest.mark.parametrize("name", [name for name in DOORS if name != "BasisUpdate"])
def test_every_field_has_bounds(name):
    """BasisUpdate has none: it may be NaN, and is written to the log alone."""
    unbounded = [path for path, info in leaves(inspect.type_info(DOORS[name].kind)) if not has_bounds(info)]
    assert not unbounded


def test_the_nasty_values_are_of_every_kind():
    assert {type(value) for value in NASTY} >= {int, float, str, bytes, list, dict, bool, type(None)}
