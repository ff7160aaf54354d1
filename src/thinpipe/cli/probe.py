"""`thinpipe probe`: prints what works with a Hugging Face model in segments."""

from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from thinpipe.config.commands import ProbeConfig
from thinpipe.core.extras import require_extra

if TYPE_CHECKING:
    from thinpipe.models.hf.probe import ProbeResult


def run(config: ProbeConfig) -> int:
    """Exit code 1 if the model cannot be trained in segments."""
    for module in ("transformers", "peft"):
        require_extra(module, extra="tune", feature="thinpipe probe")
    from thinpipe.models.hf.pretrained_config import find_config
    from thinpipe.models.hf.probe import probe
    from thinpipe.models.hf.probe_cache import probed

    stored = find_config(config.model)
    result = probe(stored) if config.again else probed(stored)
    if config.json:
        print(msgspec.json.encode(result).decode())
    else:
        Console(highlight=False).print(_table(result))
    return int(result.refusal is not None)


def _table(result: "ProbeResult") -> Table:
    verdict = "can be trained in segments" if result.refusal is None else "cannot be trained in segments"
    table = Table("", "works", "found", title=f"{result.model_type}: {verdict}", title_justify="left")
    for check in result.checks:
        table.add_row(check.name, "yes" if check.works else "no", check.detail)
    return table
