"""Builds the shared library of the device `sim` with g++: once for each state of its sources, its flags and torch.

Libraries are kept in `thinpipe-sim` of the user's cache folder. Test processes that need one at the same time build it
once, under a lock, and it is moved into place when it is whole.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


class BuildError(RuntimeError):
    """The library cannot be built on this machine."""


def build() -> Path:
    """The library of the sources in this folder, built if it is not in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinpipe-sim"
    library = cache / f"{_key()}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _compile(Path(folder)).replace(library)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _key() -> str:
    paths = sorted(path for path in FOLDER.iterdir() if path.suffix in (".h", ".cpp"))
    sources = [(path.name, path.read_text()) for path in paths]
    return hashlib.sha256(repr([sources, FLAGS, _compiler(), torch.__version__]).encode()).hexdigest()[:16]


def _compile(folder: Path) -> Path:
    from torch.utils import cpp_extension  # takes a second to import, and is needed for a build only

    if shutil.which(_compiler()) is None:
        raise BuildError(
            f"the device `sim` of the tests needs a C++ compiler, and there is no {_compiler()}: "
            "install g++ (Debian and Ubuntu: apt-get install g++), or name another compiler in CXX"
        )
    print("building the device sim of the tests: a minute, once", file=sys.stderr)
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]

    def compile_one(source: Path) -> Path:
        output = folder / f"{source.stem}.o"
        _run(_compiler(), *FLAGS, *includes, "-c", str(source), "-o", str(output))
        return output

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = [str(path) for path in pool.map(compile_one, sorted(FOLDER.glob("*.cpp")))]
    library = folder / "sim.so"
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    _run(_compiler(), "-shared", *objects, *folders, "-lc10", "-ltorch_cpu", "-o", str(library))
    return library


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
