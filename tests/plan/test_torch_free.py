"""Plans answer at once: nothing that they import brings torch."""

import pkgutil
import subprocess
import sys

import thinpipe.plan


def test_no_module_of_plans_brings_torch():
    names = [f"thinpipe.plan.{module.name}" for module in pkgutil.iter_modules(thinpipe.plan.__path__)]
    assert "thinpipe.plan.segment_costs" in names
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=280).returncode == 0
