"""A digest cannot change without another numerics version and a reason."""

import hashlib
import tomllib

import pytest

from tests.golden.oracle import DIGESTS, VERSIONS
from thinpipe.core.numerics import NUMERICS_VERSION


def faults(versions, digests, current):
    """What is wrong with these entries; nothing, if all is well."""
    numbers = [version.get("number") for version in versions]
    if numbers != list(range(1, current + 1)):
        return [f"NUMERICS_VERSION is {current}, and versions.toml has entries for {numbers}: one for each, in order"]
    found = [
        f"version {version['number']} must say in one sentence why it is another"
        for version in versions
        if not version.get("why", "").strip().endswith(".")
    ]
    hashes = [version.get("sha256") for version in versions]
    if len(set(hashes)) < len(hashes):
        found.append("two versions have the same digests")
    sha256 = hashlib.sha256(digests).hexdigest()
    if hashes[-1] != sha256:
        found.append(
            f"digests.json has sha256 {sha256}, which is not that of version {current}: whoever changes a digest "
            "raises NUMERICS_VERSION and says why in versions.toml"
        )
    return found


def test_the_digests_are_those_of_this_numerics_version():
    versions = tomllib.loads(VERSIONS.read_text(encoding="utf-8"))["version"]
    assert faults(versions, DIGESTS.read_bytes(), NUMERICS_VERSION) == []


def entry(number, digests, why="It is better."):
    return {"number": number, "sha256": hashlib.sha256(digests).hexdigest(), "why": why}


@pytest.mark.parametrize(
    ("versions", "digests", "current", "says"),
    [
        ([entry(1, b"old")], b"new", 1, "digests.json has sha256 "),
        ([entry(1, b"old")], b"new", 2, "NUMERICS_VERSION is 2, and versions.toml has entries for [1]"),
        ([entry(1, b"old"), entry(2, b"new")], b"new", 1, "NUMERICS_VERSION is 1, and "),
        ([entry(1, b"old"), entry(1, b"new")], b"new", 1, "NUMERICS_VERSION is 1, and "),
        ([entry(1, b"old"), entry(1, b"new")], b"new", 2, "NUMERICS_VERSION is 2, and "),
        ([entry(1, b"old"), entry(2, b"new", why="")], b"new", 2, "version 2 must say in one sentence why"),
        ([entry(1, b"same"), entry(2, b"same")], b"same", 2, "two versions have the same digests"),
    ],
)
def test_a_change_without_a_number_or_a_reason_is_found(versions, digests, current, says):
    assert [fault for fault in faults(versions, digests, current) if fault.startswith(says)]


def test_a_raised_number_with_a_reason_is_well():
    assert faults([entry(1, b"old"), entry(2, b"new")], b"new", 2) == []
