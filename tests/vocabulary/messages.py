"""Texts for people: phrases of an earlier vocabulary, and how the field says it.

Only the earlier sense of a word is a phrase of the table: a line of text, a life, a gate of an MLP are free.
"""

import re

PHRASES: dict[str, str] = {
    r"hearts?|errands?|ballots?|mailrooms?|rosters?|outbox(es)?|keepers?|departures": "see the words of identifiers",
    r"epochs?": "generation (an epoch is a pass over the data)",
    r"(?<!to )spares?": "standby",
    r"(its|their|your|our|my|whose|hub's|peer's|slow|slower|fast|faster|home|same|internet) lines?": "link",
    r"(the|a) line (to|between|from|is busy)|(uses?|fills?|shares?|measur\w+|over) (the|a) line|real lines": "link",
    r"lines? of (a|the|each|every) (peer|machine)s?": "link",
    r"(both|each|either|one|other) ways?(?! (to|of|in which|that|out|round)\b)(?!-)": "directions",
    r"(make|makes|made|making|no|without|enough|is|takes?|wants?|lacks?|more) room": "disk space",
    r"room (for|on|to|left|again)": "disk space",
    r"under way": "in flight, running",
    r"told(?! (apart|from)\b)": "announced, reported, asked",
    r"heard|hears": "received",
    r"gives? --|gives? (a|an|the) --": "pass --flag",
    r"so many": "n, this many",
    r"(?<!at )(most|least) (memory|bytes|seconds|nbytes)": "peak, maximum, minimum",
    r"(runs?|trains?|computes?|works?|is|was) alone": "in one process, without a hub",
    r"fe(d|eds?)(?!back)": "data loading",
    r"(its|another|earlier|later|new|old|same|previous|second|first|this|that) (life|lives)": "incarnation",
    r"the post('s)?(?! )|mails?": "connection, message",
    r"guests?": "invite probe",
    r"necks?|anchors?|anchored": "boundary projection, token prior",
    r"mend(s|ed|ing)?": "repair",
    r"vot(e|es|ed|ing)": "step reduction",
    r"(the|a|its|hub's) gates?": "admission",
    r"crossings?|passages?|legs?": "message, boundary, direction codec",
    r"drafts?|bills?": "plan, cost",
    r"hosted (run|runs)|(the|its) supplies|shipped (settings|runs?|files?)": "run host, run environment, presets",
    r"meeting place|lately|both_ways": "rendezvous, rolling stats",
    r"memor(y|ies) of (a|the|each|every) (boundary|boundaries|method|leg)": "codec state",
    r"without a word|last words|with a word": "what happened, in plain English",
}
"""Regular expression, on word boundaries and without regard to case -> how to say it."""

EXCEPTIONS: tuple[tuple[str, str, str], ...] = (
    (r"src/thinpipe/(data/dataset|boundary/aqsgd)\.py", r"epochs?", "passes over the data"),
    (r"benchmarks/(finetune|images)/.*|docs/(science|howto/fine-tune)\.md", r"epochs?", "passes over the data"),
    (r"CONTRIBUTING\.md", r"epoch", "says what an epoch is"),
    (r"CONTRIBUTING\.md", r"one way", "imports point one way"),
    (r"src/thinpipe/models/seed_names\.py", r"necks", "text from which weights are drawn"),
    (r"src/thinpipe/monitor/page\.html", r"anchor", "an attribute of SVG"),
    (
        r"src/thinpipe/swarm/protocol/invite\.py",
        r"its line|mail",
        "an invite is a line of text, and may be mailed",
    ),
    (r"ARCHITECTURE\.md", r"its line", "a line of a log"),
    (r"docs/science\.md", r"crossing", "where two curves cross"),
)
"""Files (regular expression), the phrase that they may use, and the reason."""

_PATTERNS = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): instead for phrase, instead in PHRASES.items()}


def old_phrases(text: str, file: str) -> list[tuple[str, str]]:
    """The phrases of the table that a text of `file` uses, each with what to say instead."""
    found = []
    text = re.sub(r"\s+", " ", text)
    for pattern, instead in _PATTERNS.items():
        for match in pattern.finditer(text):
            if not any(
                re.fullmatch(files, file) and re.fullmatch(phrase, match[0], re.IGNORECASE)
                for files, phrase, _ in EXCEPTIONS
            ):
                found.append((match[0], instead))
    return found
