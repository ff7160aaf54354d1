"""Identifiers, module names, settings and events: words of an earlier vocabulary, and the field's words for them.

A word of the table is allowed where `ORDINARY` says that it has its ordinary sense.
"""

import re

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
    (r"src/thinpipe/pipeline/(stage|torch_names).py", r"_warmup_forward_vote", "a method of torch's PipelineStage"),
    (r"src/thinpipe/config/families/.*", r"gate_proj", "a weight of Llama and its kin"),
    (r"src/thinpipe/models/decoder.py", r"gate", "of SwiGLU"),
    (r"benchmarks/.*|src/thinpipe/report/.*", r"bbox_to_anchor", "matplotlib's"),
    (r"benchmarks/links/figure\.py", r"anchor", "matplotlib's rotation_mode"),
    (r"src/thinpipe/(data/dataset|boundary/aqsgd)\.py", r"epochs?|steps_per_epoch", "passes over the data"),
    (r"benchmarks/(finetune|images)/.*", r"epochs?|EPOCHS|steps_per_epoch", "passes over the data"),
    (r"benchmarks/chaos/networks\.py", r"chains", "chains of nftables"),
    (r"src/thinpipe/planning/simulation/schedule_actions\.py", r"chain", "itertools.chain"),
    (
        r"src/thinpipe/models/seed_names\.py",
        r"necks|anchors|widen",
        "texts from which weights are drawn",
    ),
    (r"src/thinpipe/(monitor/state|core/foreign)\.py", r"letter", "a letter of a text"),
    (r"benchmarks/chaos/results\.py", r"executing_with_spare", "field of committed records"),
    (
        r"benchmarks/convergence/execute\.py",
        r"neck|anchor_rank|anchor_reach|line_share",
        "settings in committed records, read under their names of today",
    ),
)
"""Files, their identifiers whose word has its ordinary sense, and which that is."""


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
