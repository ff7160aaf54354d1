"""Records or compares golden digests: `python -m tests.golden record`, `python -m tests.golden check [CASE ...]`."""

import argparse
import sys
import time

from tests.golden.environment import why_undecidable
from tests.golden.oracle import CASES, differences, load, observe, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("verb", choices=["record", "check"])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all, unless some are named")
    parser.add_argument("--overwrite", action="store_true", help="replace digests that are recorded already")
    arguments = parser.parse_args()
    cases = arguments.cases or list(CASES)
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"there is no case {', '.join(unknown)}; there are: {', '.join(CASES)}")
    if arguments.verb == "record":
        refusal = record(cases, overwrite=arguments.overwrite)
        done = f"recorded {len(cases)} cases; what to do next is at the head of tests/golden/versions.toml"
        print(refusal or done, file=sys.stderr if refusal else sys.stdout)
        return 2 if refusal else 0
    return check(cases)


def check(cases: list[str]) -> int:
    """0: all numbers are the recorded ones. 1: some are not. 3: this machine cannot decide."""
    recorded, differing = load(), 0
    if reason := why_undecidable(recorded):
        print(reason, file=sys.stderr)
        return 3
    for case in cases:
        started = time.monotonic()
        observed = observe(case)
        if case not in recorded["cases"]:
            print(f"{case}: was never recorded")
            differing += 1
            continue
        found = list(differences(case, recorded["cases"][case], observed))
        differing += bool(found)
        seconds = time.monotonic() - started
        print(f"{found[0]} (the first of {len(found)})" if found else f"{case}: the same ({seconds:.1f} s)", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
