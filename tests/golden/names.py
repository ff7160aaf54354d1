"""Names of the day the digests were recorded, and what they are called now: the one place to note a rename.

`digests.json` names tensors and figures of a plan as they were called when they were recorded, and stays as it is.
Whoever renames one adds a line here, old name -> new name, and the digest is looked up under the new name.

A line is for one or several whole components of a name; components are what dots, colons and slashes separate. So
"anchors": "tables" renames `necks.1.anchors.tokens.weight`, but not a component `anchors_before`. A `*` is any one
component and is kept: "necks.*.entry": "segments.*.entry". The longest line that fits wins, and no line is applied to
what another has put there.
"""

import re

RENAMED: dict[str, str] = {
    "necks": "projections",
    "anchors": "token_prior",
    "pairs": "bigrams",
    "entry": "up_projection",
    "exit": "down_projection",
    "widen": "up_project",
}
"""Of tensors in checkpoints, such as `blocks.0.mlp.up_proj.weight:exp_avg` or `boundary.0.sender/states.error_BTW`."""

RENAMED_EXPORTED: dict[str, str] = {
    "boundary.anchors": "boundary.token_prior",
    "pairs": "bigrams",
    "boundary.entry": "boundary.up_projection",
    "boundary.exit": "boundary.down_projection",
    "widen": "up_project",
}
"""Of tensors in exported folders. Those of Llama and GPT-2 are Hugging Face's; a keel's, such as
`model.layers.1.boundary.anchors.tokens.rows.weight`, are ours."""

RENAMED_FIGURES: dict[str, str] = {"lines": "links"}
"""Of figures in the JSON of a plan, such as `machines.0.memory_nbytes.weights`."""

_COMPONENT = r"[^.:/]+"


def name_now(old: str, renamed: dict[str, str]) -> str:
    """What is called so today."""
    if not renamed:
        return old
    lines = sorted(renamed, key=len, reverse=True)
    patterns = [
        "".join(f"({_COMPONENT})" if part == "*" else re.escape(part) for part in _parts(line)) for line in lines
    ]
    either = "|".join(f"(?P<line{index}>{pattern})" for index, pattern in enumerate(patterns))

    def replacement(found: re.Match[str]) -> str:
        index = next(index for index in range(len(lines)) if found[f"line{index}"] is not None)
        kept = iter(re.fullmatch(patterns[index], found[0]).groups())
        return "".join(next(kept) if part == "*" else part for part in _parts(renamed[lines[index]]))

    return re.sub(rf"(?<![^.:/])(?:{either})(?![^.:/])", replacement, old)


def _parts(line: str) -> list[str]:
    """Components and what separates them."""
    return [part for part in re.split(r"([.:/])", line) if part]
