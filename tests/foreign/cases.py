"""Cases for whatever comes from other machines, made from the types themselves: values within their bounds, at their
bounds and beyond, fields too many and too few, and encodings whose bytes were changed."""

import math
import re

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

SAMPLES = (
    "", "p0", "p1", "mallory", "a" * 32, "1.0 cpu", "first.safetensors", "blocks.0.safetensors", "0" * 64, "f" * 64,
    "tokenizer/tokenizer.json", "step-00000004/first.safetensors", "a/b", "training.steps",
)  # fmt: skip
NASTY_TEXTS = (
    "\x1b[2J", "[/x]", "\u202e\u2028", "../../etc/passwd", "/etc/passwd", "con.safetensors", "nul", "é" * 40, "hub",
    " ", "A" * 64, "0" * 63, "p 0", "\0", "tokenizer/../x", "..", "x" * 501, "x" * 5001, "x\n", "first.safetensors\n",
)  # fmt: skip
NASTY = (
    None, True, -1, 0, 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.0, -0.0, 5e-324,
    1e-30, 1e30, 1e31, 1e308, -1e308, math.inf, -math.inf, math.nan, b"", b"\xff" * 9, [], {}, [[]], {"": None},
    [None] * 50, {"type": "measure"}, *NASTY_TEXTS,
)  # fmt: skip


def values(kind):
    """Values of a type as `msgspec.to_builtins` gives them, within its bounds."""
    return _values(inspect.type_info(kind))


def _values(info):
    match info:
        case inspect.Metadata():
            return _values(info.type)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType():
            return _within(info, -(1 << 63), (1 << 63) - 1, st.integers)
        case inspect.FloatType():
            return _within(info, -1e300, 1e300, st.floats)
        case inspect.StrType():
            return _texts(info)
        case inspect.BytesType():
            return st.binary(max_size=min(info.max_length or 64, 64))
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(_values(info.item_type), min_size=info.min_length or 0, max_size=3)
        case inspect.TupleType():
            return st.tuples(*map(_values, info.item_types))
        case inspect.DictType():
            keys, least = _values(info.key_type), info.min_length or 0
            return st.dictionaries(keys, _values(info.value_type), min_size=least, max_size=3)
        case inspect.UnionType():
            return st.one_of(*map(_values, info.types))
        case inspect.StructType():
            return _structs(info)
        case inspect.DataclassType():
            return st.fixed_dictionaries({field.encode_name: _values(field.type) for field in info.fields})
        case inspect.AnyType():
            plain = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.sampled_from(NASTY_TEXTS)
            return st.recursive(plain, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
    raise NotImplementedError(info)


def _within(info, least, most, strategy):
    low = least if info.ge is None else info.ge
    high = most if info.le is None else info.le
    kind = type(low) if strategy is st.integers else float
    return st.sampled_from([kind(low), kind(high)]) | strategy(kind(low), kind(high))


def _texts(info):
    longest = 200 if info.max_length is None else info.max_length
    if info.pattern is None:
        return st.text(max_size=min(longest, 12)) | st.sampled_from(
            [text for text in NASTY_TEXTS if len(text) <= longest]
        )
    fitting = [text for text in (*SAMPLES, *NASTY_TEXTS) if re.search(info.pattern, text)]
    return st.sampled_from([text for text in fitting if (info.min_length or 0) <= len(text) <= longest])


def _structs(info):
    required = {field.encode_name: _values(field.type) for field in info.fields if field.required}
    optional = {field.encode_name: _values(field.type) for field in info.fields if not field.required}
    if info.array_like:
        return st.tuples(*(_values(field.type) for field in info.fields)).map(list)
    tags = {} if info.tag_field is None else {info.tag_field: st.just(info.tag)}
    return st.fixed_dictionaries({**required, **tags}, optional=optional)


def spoilt(value, dice):
    """The value with one thing in it replaced, left out, doubled or added."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice(list(value))
        match dice.randrange(4):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return {**value, dice.choice(NASTY_TEXTS): dice.choice(NASTY)}
            case _:
                return {**value, name: spoilt(value[name], dice)}
    if isinstance(value, list | tuple) and value and dice.random() < 0.8:
        index = dice.randrange(len(value))
        if dice.random() < 0.5:
            return [*value[:index], spoilt(value[index], dice), *value[index + 1 :]]
        return [*value, value[index]] if dice.random() < 0.5 else list(value[:index])
    if isinstance(value, bool) or value is None or dice.random() < 0.6:
        return dice.choice(NASTY)
    if isinstance(value, int):
        return dice.choice((value + 1, value - 1, -value, (value << 40) & ((1 << 63) - 1), float(value), str(value)))
    if isinstance(value, float):
        return dice.choice((value * 2, -value, value / 1e30, value * 1e30, math.nan, math.inf))
    if isinstance(value, str):
        return dice.choice((value + dice.choice(NASTY_TEXTS), value * 600, value.encode(), value.upper()))
    return dice.choice(NASTY)


def damaged(data, dice):
    """An encoding with bytes changed, cut off, put in or put behind."""
    data = bytearray(data)
    match dice.randrange(5):
        case 0:
            return bytes(data[: dice.randrange(len(data) + 1)])
        case 1:
            return bytes(data) + dice.randbytes(dice.randrange(1, 9))
        case 2:
            place = dice.randrange(len(data) + 1)
            return bytes(data[:place] + dice.randbytes(dice.randrange(1, 9)) + data[place:])
        case 3:
            return bytes(data[:1]) + dice.choice((b"\x91", b"[", b"\x81\xa1a")) * dice.choice((10, 100_000))
        case _:
            for _ in range(dice.randrange(1, 4)):
                if data:
                    data[dice.randrange(len(data))] = dice.choice(
                        (0, 0x7F, 0x80, 0xC0, 0xC1, 0xFF, dice.randrange(256))
                    )
            return bytes(data)


def encoded(value, form):
    """In JSON, which has no other way to say it, what is not finite becomes a number that no float holds."""
    if form == "msgpack":
        return msgspec.msgpack.encode(value)
    return (
        msgspec.json.encode(value).replace(b"null", b"1e999", 1) if _has_infinite(value) else msgspec.json.encode(value)
    )


def _has_infinite(value):
    if isinstance(value, dict):
        return any(map(_has_infinite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_infinite, value))
    return isinstance(value, float) and not math.isfinite(value)


@st.composite
def cases(draw, kind, form):
    """(way, data) for `decode_foreign(data, kind, form=form)`: a third of it valid, at the bounds and within; a third
    nearly; a third with changed bytes."""
    value, way = draw(values(kind)), draw(st.sampled_from(("valid", "spoilt", "damaged")))
    dice = draw(st.randoms(use_true_random=False))
    if way == "spoilt":
        value = spoilt(value, dice)
    data = encoded(value, form)
    return way, damaged(data, dice) if way == "damaged" else data
