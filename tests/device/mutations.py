"""Deletes each statement that orders our copies, one after the other, and runs the tests that should notice.

    python -m tests.device.mutations [TEXT]

prints a table: the statement, how many tests failed without it, under how many of the 20 seeds (tests of what no seed
changes have none), and one such test. TEXT chooses the statements that contain it. The program ends with 1 if a
deletion was not noticed. Statements are found in the syntax tree, so that a new one is covered: calls of the names in
ORDERING, and attributes that are set and never read, which keep memory alive. Such a call inside a larger expression is
an error, because it cannot be deleted by itself.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "thinpipe"
MODULES = ("device/host_copies.py", "pipeline/p2p.py")
TESTS = [
    f"tests/device/test_copies.py::{name}"
    for name in ("TestToTheHost", "TestToTheDevice", "TestThroughTheDevice", "TestSendsAndReceives")
]
"""Tests that end at once when something is missing, and wait for no message that was never sent."""
ORDERING = {"wait", "wait_event", "wait_for", "wait_stream", "record", "record_event", "record_stream", "synchronize"}


@dataclass(frozen=True)
class Mutation:
    """A statement to delete."""

    module: str
    line: int
    text: str

    def delete_in(self, package: Path) -> None:
        path = package / self.module
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(body, list):
                    body[:] = [ast.Pass() if _is_at(part, self.line) else part for part in body]
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _is_at(part: ast.AST, line: int) -> bool:
    return isinstance(part, ast.Expr | ast.Assign) and part.lineno == line


def mutations(source: str, module: str) -> Iterator[Mutation]:
    """Statements of the module that order work or keep memory. Raises ValueError for a call that is no statement."""
    tree = ast.parse(source)
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    whole = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING:
            if id(node) not in whole:
                raise ValueError(f"{module}:{node.lineno}: {ast.unparse(node)} is no statement of its own")
            yield Mutation(module, node.lineno, ast.unparse(node))
        if isinstance(node, ast.Assign):
            names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
            if any(name.startswith("_") and name not in read for name in names):
                yield Mutation(module, node.lineno, ast.unparse(node))


def all_mutations() -> list[Mutation]:
    found = [one for module in MODULES for one in mutations((PACKAGE / module).read_text(), module)]
    return sorted(found, key=lambda one: (one.module, one.line))


def failures(mutation: Mutation | None, *options: str) -> list[str]:
    """Names of the tests that fail without the statement, or with all statements; `options` are pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "thinpipe"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            mutation.delete_in(package)
        paths = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1800)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not failed and not re.search(r"\d+ passed", done.stdout):
        raise RuntimeError(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed


def main() -> int:
    if failed := failures(None):
        print(f"tests fail before anything is deleted: {', '.join(failed)}")
        return 1
    survived = 0
    print("| deleted | of | tests that fail | in seeds | for example |\n|---|---|---|---|---|")
    for mutation in all_mutations():
        if not all(wanted in mutation.text for wanted in sys.argv[1:]):
            continue
        failed = failures(mutation)
        survived += not failed
        example = failed[0].rsplit("::", 1)[-1].partition("[")[0] if failed else "**none**"
        seeds = len({seed for name in failed for seed in re.findall(r"seed\d+", name)})
        where = f"{mutation.module}:{mutation.line}"
        print(f"| `{mutation.text}` | {where} | {len(failed)} | {seeds} | {example} |", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
