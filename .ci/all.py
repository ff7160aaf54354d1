"""Every test, part by part. A part that passed is noted under the commit, so that a run that was cut off goes on.

With uncommitted changes nothing is noted and nothing is taken from notes: a commit stands for the files it names.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

DEFAULT = ("-n", "2", "--dist", "worksteal", "-m", "not quiet and not long")
ALONE = ("-m", "quiet or long")
"""One test at a time: these compare times, or take all there is."""
NO_TESTS = 5
"""pytest's exit code for a folder that has none of the kind."""


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def parts() -> dict[str, list[str]]:
    """Name -> command. The folders of `tests/` and the files beside them are all tests there are."""
    places = sorted(path for path in Path("tests").iterdir() if path.is_dir() or path.name.startswith("test_"))
    places = [path for path in places if path.is_file() or list(path.rglob("test_*.py"))]
    pytest = [sys.executable, "-m", "pytest", "-q", "--durations=10"]
    found = {f"default-{path.name}": [*pytest, *DEFAULT, str(path)] for path in places}
    found |= {f"alone-{path.name}": [*pytest, *ALONE, str(path)] for path in places}
    output = str(Path(sys.prefix) / "dist")
    found["wheel"] = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output]
    found["site"] = [sys.executable, "docs/make_site.py"]
    return found


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinpipe-ci" / "passed"
    notes = None if output_of("git", "status", "--porcelain") else cache / output_of("git", "rev-parse", "HEAD")
    every = parts()
    for number, (name, command) in enumerate(every.items(), start=1):
        if notes is not None and (notes / name).exists():
            print(f"== {number}/{len(every)} {name}: {(notes / name).read_text().strip()}", flush=True)
            continue
        print(f"\n== {number}/{len(every)} {name}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command).returncode
        if code not in (0, NO_TESTS):
            print(f"== {name} failed with exit code {code}; the parts before it passed", flush=True)
            return code
        if notes is not None:
            notes.mkdir(parents=True, exist_ok=True)
            (notes / name).write_text(f"passed earlier at this commit, in {time.monotonic() - began:.0f} s\n")
    print(f"\nall {len(every)} parts passed" + ("" if notes else "; not noted, because of uncommitted changes"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
