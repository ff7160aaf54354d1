"""Plans answer at once: nothing that they import brings torch."""

import pkgutil
import subprocess
import sys

import thinpipe.planning


def test_no_module_of_plans_brings_torch():
    names = [f"thinpipe.planning.{module.name}" for module in pkgutil.iter_modules(thinpipe.planning.__path__)]
    assert "thinpipe.planning.segment_costs" in names
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=280).returncode == 0
