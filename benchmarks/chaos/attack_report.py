"""The section on attacks of the page of `python -m benchmarks.chaos`, over all seeds in the folder."""

from collections.abc import Sequence

from benchmarks.chaos.attacks.catalogue import ATTACK_NAMES, ATTACKS, AttackName
from benchmarks.chaos.results import AttackResult, SeedResult, percentile
from benchmarks.chaos.tables import head, row


def attack_table(results: Sequence[SeedResult]) -> str:
    """A row for each attack, and below what it sends, what is to answer it, and the words that named the attacker."""
    present = {
        name: found
        for name in ATTACK_NAMES
        if (found := [each for result in results for each in result.attacks if each.attack == name])
    }
    if not present:
        return "There was no hostile member."
    names = [
        "attack",
        "ordered",
        "carried out",
        "as one who computed",
        "named",
        "struck off",
        "stopped all for, s",
        "harm",
    ]
    lines = [*head(names), *(_row(name, found) for name, found in present.items())]
    lines += [
        "",
        "`named`: how often the hub named the attacker; in brackets where it need not, because nothing happens.",
    ]
    lines += ["`stopped all for`: p50 and longest, where nothing but this attack happened.", ""]
    lines += [_words(name, found) for name, found in present.items()]
    return "\n".join(lines)


def _row(name: AttackName, found: Sequence[AttackResult]) -> str:
    named = sum(each.named for each in found)
    seconds = [value for each in found for value in each.stopped_for]
    return row(
        [
            name,
            str(sum(each.ordered for each in found)),
            str(sum(each.carried_out for each in found)),
            str(sum(each.computing for each in found)),
            str(named) if ATTACKS[name].named else f"({named})",
            str(sum(each.struck_off for each in found)),
            f"{percentile(seconds, 50):.1f}, {max(seconds):.1f}" if seconds else "",
            str(sum(len(each.harm) for each in found) or ""),
        ]
    )


def _words(name: AttackName, found: Sequence[AttackResult]) -> str:
    text = f"- **{name}** sends {ATTACKS[name].sends}. To answer it: {ATTACKS[name].answer}."
    if words := next((each.named_by for each in found if each.named_by), ""):
        text += f" Named by: `{words[:200]}`"
    harm = dict.fromkeys(words[:200] for each in found for words in each.harm)
    problems = dict.fromkeys(words[:200] for each in found for words in each.problems)
    text += "".join(f" Harm: `{words}`." for words in list(harm)[:3])
    return text + "".join(f" Not carried out: `{words}`." for words in list(problems)[:3])
