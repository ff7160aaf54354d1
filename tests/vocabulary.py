"""Words of an earlier vocabulary for things that have a name in the field: `python -m tests.vocabulary` lists them.

Looks at every module name, identifier, string that names something (events, settings, subjects, files) and message of
`src`, `benchmarks` and `examples`. A word of the table is allowed where `ORDINARY` says that it has its ordinary sense.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "benchmarks", "examples")

WORDS: dict[str, str] = {
    "anchor": "token prior",
    "ballot": "step reduction",
    "beat": "heartbeat",
    "bill": "cost",
    "chain": "stage module",
    "crossing": "message id, boundary traffic",
    "departures": "disconnects",
    "dial": "client, connection",
    "draft": "plan",
    "epoch": "generation (a pass over the data is an epoch)",
    "errand": "pending request",
    "gate": "admission",
    "gave": "uploaded",
    "guest": "invite probe",
    "heard": "on_event, received",
    "heart": "heartbeat",
    "hosted": "run host",
    "keeper": "supervisor, uploader",
    "lately": "rolling stats",
    "leg": "direction codec",
    "letter": "outgoing frame",
    "life": "incarnation",
    "mailroom": "flow control",
    "mending": "repair",
    "neck": "boundary projection",
    "outbox": "send stream",
    "passage": "message context",
    "roster": "membership",
    "shipped": "presets",
    "shorten": "down project",
    "spare": "standby",
    "supplies": "run environment",
    "told": "announced",
    "vote": "reduction",
    "widen": "up project",
}
"""Word -> the field's word. Plurals count."""

IDENTIFIERS: dict[str, str] = {
    r"alone_in|_alone": "run_lock",
    r"go_back": "rollback",
    r"line_(test|share|loads|busy|nbytes|of)|both_ways|guest_line|LineSpec|LineFile": "link, bandwidth probe",
    r"(most|MOST)_\w+|\w+_most|(least|LEAST)_\w+": "max_, min_",
    r"own_names": "host check",
    r"so_many\w*": "n_",
    r"under_way": "in flight",
    r"\w+Section": "*Config, *Settings",
}
"""Patterns of whole identifiers, for words that are ordinary English by themselves."""

ORDINARY: tuple[tuple[str, str, str], ...] = (
    (r"src/thinpipe/config/families/llama.py", r"gate_proj", "a weight of Llama"),
    (r"src/thinpipe/models/decoder.py", r"gate", "of SwiGLU"),
    (r"benchmarks/.*|src/thinpipe/report/.*", r"bbox_to_anchor", "matplotlib's"),
    (r"benchmarks/links/figure\.py", r"anchor", "matplotlib's rotation_mode"),
    (r"src/thinpipe/(data/dataset|boundary/aqsgd)\.py", r"epochs?|steps_per_epoch", "passes over the data"),
    (r"benchmarks/(finetune|images)/.*", r"epochs?|EPOCHS|steps_per_epoch", "passes over the data"),
    (r"benchmarks/chaos/networks\.py", r"chains", "chains of nftables"),
    (r"src/thinpipe/plan/simulation/schedule_actions\.py", r"chain", "itertools.chain"),
    (
        r"src/thinpipe/models/seed_names\.py",
        r"necks|anchors|widen",
        "texts from which weights are drawn",
    ),
    (r"src/thinpipe/(monitor/state|swarm/protocol/decoding)\.py", r"letter", "a letter of a text"),
    (r"benchmarks/chaos/results\.py", r"executing_with_spare", "field of committed records"),
    (
        r"benchmarks/convergence/execute\.py",
        r"neck|anchor_rank|anchor_reach|line_share",
        "settings in committed records, read under their names of today",
    ),
)
"""Files, their identifiers whose word has its ordinary sense, and which that is."""


@dataclass(frozen=True)
class Found:
    path: Path
    line: int
    text: str
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text!r} has {self.word!r}: say {self.instead}"


def components(name: str) -> list[str]:
    """`LineSpec` and `line_spec` -> line, spec; plurals as singulars."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    return [part.removesuffix("s") if part.removesuffix("s") in WORDS else part for part in parts if part]


def old_word(name: str, file: str) -> tuple[str, str] | None:
    """The word of the table that an identifier of `file` has, and what to say instead."""
    if any(re.fullmatch(files, file) and re.fullmatch(pattern, name) for files, pattern, _ in ORDINARY):
        return None
    for pattern, instead in IDENTIFIERS.items():
        if re.fullmatch(pattern, name):
            return name, instead
    return next(((part, WORDS[part]) for part in components(name) if part in WORDS), None)


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Identifiers, and strings that name something."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(name=name, asname=asname):
                yield from ((node.lineno, part) for part in (*name.split("."), asname) if part)
            case ast.Constant(value=str(text)) if re.fullmatch(r"[A-Za-z_]\w*", text):
                yield node.lineno, text


def search(folder: Path = ROOT) -> Iterator[Found]:
    for path in sorted(path for name in FOLDERS for path in (folder / name).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in [(1, path.stem), *names_in(tree)]:
            if found := old_word(name, path.relative_to(folder).as_posix()):
                yield Found(path, line, name, *found)


def main() -> int:
    found = list(search())
    print(*found, f"{len(found)} left", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
