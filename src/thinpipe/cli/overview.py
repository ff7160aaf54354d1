"""What `thinpipe` alone and `thinpipe --help` print: every verb in a few words, by what it is for. Imports nothing, so
that it is there at once."""

GROUPS: dict[str, dict[str, str]] = {
    "Begin": {
        "demo": "see the idea on this machine, in three minutes",
        "new": "write a settings file, from a few questions or flags",
        "tokenize": "turn text or chats into tokens to train on",
        "plan": "predict whether a run fits, its speed and its cost",
        "doctor": "check this machine, a run or an invite",
        "selftest": "measure this machine, for plans and for bug reports",
    },
    "Train": {
        "train": "train on this machine, or resume",
        "up": "try a run with friends, all on this machine",
        "hub": "host a run for peers on other machines",
        "join": "take part in a run, with an invite",
    },
    "Look after a run": {
        "status": "peers, their segments and the bottleneck",
        "watch": "live view of a run in the terminal",
        "invite": "print, list or revoke invites",
        "kick": "remove a peer",
        "service": "keep a hub or a joined machine running over restarts",
        "report": "write a page with figures",
    },
    "Use a model": {
        "generate": "let it write, or answer held-out chats",
        "eval": "perplexity on validation text",
        "export": "write a folder for transformers or peft",
    },
    "Further": {
        "probe": "can a Hugging Face model be trained in segments?",
        "import": "convert a Hugging Face folder",
        "completion": "completion of commands and flags for your shell",
    },
}
"""Verbs by group, each with its summary."""


def overview() -> str:
    lines = [
        "Train language models over ordinary internet links.",
        "",
        "usage: thinpipe VERB [--help | --help-all] ...",
    ]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<11} {summary}" for name, summary in verbs.items())]
    lines += [
        "",
        "First: thinpipe demo; then: thinpipe new",
    ]
    return "\n".join(lines)
