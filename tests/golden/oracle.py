"""All golden cases: running them, keeping what they came to, and finding the first number that differs."""

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.golden import boundaries, hub, runs
from tests.golden.environment import arithmetic, machine_facts, why_undecidable
from tests.golden.names import RENAMED, RENAMED_EXPORTED, RENAMED_FIGURES, name_now
from thinpipe.core.files import file_sha256

DIGESTS = Path(__file__).parent / "digests.json"
VERSIONS = Path(__file__).parent / "versions.toml"
GROUPS: dict[str, Callable[[Path], dict[str, dict]]] = {
    "one process": runs.one_process,
    "links": runs.links,
    "boundaries": boundaries.run_pair,
    "hub": hub.lost_peer,
    "plans": runs.plans,
}
"""Cases that share processes, because starting one costs seconds."""
CASES: dict[str, str] = {
    **dict.fromkeys(("quick start", "keel", "subspace", "gpt2"), "one process"),
    "links": "links",
    **dict.fromkeys(boundaries.CASES, "boundaries"),
    "hub with a lost peer": "hub",
    **dict.fromkeys(runs.PLANS, "plans"),
}
"""Every case, and the group that it is run with."""
NAMED = {"tensors": RENAMED, "figures": RENAMED_FIGURES, "exported": RENAMED_EXPORTED}
"""Parts of a case that are looked up by name; all other parts are compared in their order."""
COMPLETE = ("tensors", "exported")
"""Parts in which nothing may be that was not recorded. A plan may say more than it did."""


@cache
def observe_group(group: str) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        return GROUPS[group](Path(folder))


def observe(case: str) -> dict:
    """What a case comes to now."""
    return observe_group(CASES[case])[case]


def load() -> dict:
    """What was recorded."""
    return json.loads(DIGESTS.read_text(encoding="utf-8"))


def differences(case: str, recorded: dict, observed: dict) -> Iterator[str]:
    """One sentence for each number that is not the recorded one, in the order of computation."""
    for part, values in recorded.items():
        if part in NAMED:
            yield from named_differences(case, part, values, observed.get(part, {}))
        else:
            yield from ordered_differences(case, part, values, observed.get(part, []))
    for part in observed.keys() - recorded.keys():
        yield f"{case}: {part} were not recorded, and there are some now"


def ordered_differences(case: str, part: str, recorded: list, observed: list) -> Iterator[str]:
    for index, (before, now) in enumerate(zip(recorded, observed, strict=False), start=1):
        if before != now:
            yield f"{case}: {part}, number {index}: recorded {say(before)}, now {say(now)}"
    if len(recorded) != len(observed):
        yield f"{case}: {part}: recorded {len(recorded)}, now there are {len(observed)}"


def named_differences(case: str, part: str, recorded: list, observed: dict) -> Iterator[str]:
    known = set()
    for old, before in recorded:
        name = name_now(old, NAMED[part])
        called = old if name == old else f"{old}, which is called {name} now"
        known.add(name)
        if name not in observed:
            yield f"{case}: {part}: there is no {called}; add its new name to tests/golden/names.py if it has one"
        elif observed[name] != before:
            yield f"{case}: {part}: {called}: recorded {say(before)}, now {say(observed[name])}"
    if part in COMPLETE:
        for name in observed.keys() - known:
            yield f"{case}: {part}: {name} was not recorded"


def say(value) -> str:
    """Floats also as people write them."""
    if isinstance(value, list):
        return "[" + ", ".join(map(say, value)) + "]"
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return f"{value} ({float.fromhex(value)!r})"
    return str(value)


def as_recorded(observed: dict) -> dict:
    return {part: [*values.items()] if part in NAMED else values for part, values in observed.items()}


def record(cases: list[str], *, overwrite: bool) -> str:
    """Writes what these cases come to now; returns why not, if nothing was written."""
    kept = load() if DIGESTS.exists() else {"cases": {}}
    known = [case for case in cases if case in kept["cases"]]
    if known and not overwrite:
        return (
            f"{len(known)} of {len(cases)} are recorded already, {known[0]} first: --overwrite if numbers are to change"
        )
    others = kept["cases"].keys() - set(cases)
    if others and (reason := why_undecidable(kept)):
        return f"{reason}: new cases must be recorded where the other {len(others)} can be compared"
    written = {**kept["cases"], **{case: as_recorded(observe(case)) for case in cases}}
    ordered = {case: written[case] for case in CASES if case in written}
    origin = {key: kept[key] for key in ("recorded_with", "arithmetic")} if others else None
    whole = {**(origin or {"recorded_with": machine_facts(), "arithmetic": arithmetic()}), "cases": ordered}
    before = file_sha256(DIGESTS) if DIGESTS.exists() else ""
    DIGESTS.write_text(dump(whole) + "\n", encoding="utf-8")
    if not known and before:  # cases were only added: the same numerics version, with another file
        text = VERSIONS.read_text(encoding="utf-8")
        VERSIONS.write_text(text.replace(before, file_sha256(DIGESTS)), encoding="utf-8")
    return ""


def dump(value, indent: str = "") -> str:
    """JSON with one line for each pair, step or number."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {dump(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, list | tuple) for part in value):
        return "[\n" + ",\n".join(f"{inner}{json.dumps(part)}" for part in value) + f"\n{indent}]"
    return json.dumps(value)
