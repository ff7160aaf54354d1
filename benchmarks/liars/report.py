"""The results of `python -m benchmarks.liars` as a page: when each lie was seen, and by what.

python -m benchmarks.liars.report benchmarks/results/liars
"""

import json
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "loss_recomputed": "loss of the step after a commit",
    "commit_measured": "loss of the hub's own batch",
    "layers_unchanged": "change of layers",
    "boundary_alarm": "figures at a boundary",
}
PAGE = """# Liars

Real `thinpipe hub` and three `thinpipe join` on loopback, one of which lies; a small model, a commit every 10 steps.
Command: `python -m benchmarks.liars --steps {steps}`; page: `python -m benchmarks.liars.report`. {versions}.
"Seen at" is the step of the first alarm, and in brackets how many there were.

| lie | seed | devices | steps | {kinds} |
|---|---:|---|---:|{rules}
{rows}

Largest relative difference between a reported and a recomputed loss in runs in which nobody lies: {honest}.
"""


def cell(found: dict[str, Any], kind: str) -> str:
    first = found["first_alarms"].get(kind)
    if first is None:
        return "not seen"
    return f"step {first['step']} ({first['count']}): {', '.join(first['peers'])}"


def row(found: dict[str, Any]) -> str:
    devices = "CPU and `sim`" if found["second_device"] else "CPU"
    cells = [
        " ".join(found["what"].split()),
        str(found["seed"]),
        devices,
        str(found["steps"]),
        *(cell(found, kind) for kind in KINDS),
    ]
    return f"| {' | '.join(cells)} |"


def largest_honest_difference(results: list[dict[str, Any]]) -> str:
    differences = [
        abs(check["reported"] / check["recomputed"] - 1)
        for found in results
        if found["lie"] == "honest"
        for check in found["checks"]
        if check["event"] == "loss_recomputed"
    ]
    return f"{max(differences):.1e} in {len(differences)} audits" if differences else "not measured"


def page(folder: Path) -> str:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    versions = ", ".join(f"{name} {version}" for name, version in results[0]["versions"].items())
    return PAGE.format(
        steps=results[0]["steps"],
        versions=versions,
        kinds=" | ".join(KINDS.values()),
        rules="---|" * len(KINDS),
        rows="\n".join(map(row, results)),
        honest=largest_honest_difference(results),
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "README.md").write_text(page(target))
