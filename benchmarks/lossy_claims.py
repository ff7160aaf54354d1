"""The claims of arXiv 2401.07788 about lossy boundaries, each with its configuration and its rule, for every study.

A study gives `Evidence` and gets the claims decided by `benchmarks.verdicts`. A run counts with the better of its two
kinds of inference, compression on or off, unless the claim is about these. What the paper leaves open about masks and
feedback is tried in both variants, `MASKS`, and each variant has a verdict of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.verdicts import RULES, Claim, Finding, Judge, Measured, Verdict, at_every_strength, lowest

Masks = Literal["own masks", "mask reused"]
Feedback = Literal["EF", "EF21", "AQ-SGD"]
Levels = Mapping[float, Measured]
"""By the share that is kept, or by bits."""

MASKS: tuple[Masks, ...] = ("own masks", "mask reused")
FEEDBACKS: tuple[Feedback, ...] = ("EF", "EF21", "AQ-SGD")
PLAIN: Mapping[Masks, str] = {
    "own masks": "TopK in both directions, each with its own mask",
    "mask reused": "TopK of activations, gradients at the same places",
}
WITH_FEEDBACK: Mapping[Masks, str] = {
    "own masks": "TopK in both directions, each with its own mask and memory",
    "mask reused": "TopK and memory of activations, gradients at the same places",
}
WITH_AQSGD: Mapping[Masks, str] = {
    "own masks": "TopK in both directions, each with its own mask; memory of activations",
    "mask reused": "TopK and memory of activations, gradients at the same places",
}
ALMOST_NONE = 0.1
"""Of the gain: a drop that is none to speak of."""
LOWEST_TOPK, LOWEST_AQSGD = 0.1, 0.3
HOW_TO_READ = (
    f"{RULES} A run counts with the better of its two ways of inference, compression on or off, unless the claim is "
    f"about these. Almost no drop is at most {ALMOST_NONE:.0%}. What makes no difference does not help. Figures: mean "
    "± half the range over seeds."
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a study measured. Strengths of a comparison are those that both sides have."""

    topk_gradients: Levels
    topk_activations: Levels
    quantised_gradients: Levels
    quantised_activations: Levels
    topk: Mapping[Masks, Levels]
    """Of both directions."""
    feedbacks: Mapping[tuple[Feedback, Masks], Levels]


def decide(evidence: Evidence, judge: Judge) -> list[Claim]:
    return [
        gradients_need_milder(judge, evidence),
        gradients_need_milder_bits(judge, evidence),
        *(lowest_topk(judge, evidence.topk[masks], masks) for masks in MASKS),
        *(needs_compression_at_inference(judge, evidence.topk[masks], masks) for masks in MASKS),
        mask_should_be_reused(judge, evidence.topk),
        *_feedback(judge, evidence),
        *(aqsgd_hurts(judge, evidence.feedbacks["AQ-SGD", masks], evidence.topk[masks], masks) for masks in MASKS),
    ]


def _feedback(judge: Judge, evidence: Evidence) -> Iterator[Claim]:
    feedbacks: tuple[Feedback, ...] = ("EF", "EF21")
    for rule in (feedback_does_not_help, feedback_frees_inference):
        for feedback in feedbacks:
            for masks in MASKS:
                yield rule(judge, feedback, evidence.feedbacks[feedback, masks], evidence.topk[masks], masks)


def gradients_need_milder(judge: Judge, evidence: Evidence) -> Claim:
    figures, verdict = _pairs(judge, judge.worse, evidence.topk_gradients, evidence.topk_activations)
    return Claim(
        text="Gradients need milder compression than activations",
        configuration="TopK of one direction, the other whole: gradients / activations",
        figures=figures,
        verdict=verdict,
    )


def gradients_need_milder_bits(judge: Judge, evidence: Evidence) -> Claim:
    figures, verdict = _pairs(judge, judge.worse, evidence.quantised_gradients, evidence.quantised_activations)
    return Claim(
        text="The same with quantisation, which says less: two quantisers are compared, since here activations are "
        "rounded to the nearest and gradients at random",
        configuration="Quantisation of one direction, the other whole: gradients / activations",
        figures=figures,
        verdict=verdict,
    )


def lowest_topk(judge: Judge, levels: Levels, masks: Masks) -> Claim:
    badly = {level: judge.hurts_badly(measured.best) for level, measured in levels.items()}
    shown = {level_name(level): judge.show(levels[level].best) for level in levels}
    figures, _ = at_every_strength({level_name(level): found for level, found in badly.items()}, shown)
    return Claim(
        text=f"K = {LOWEST_TOPK:.0%} is the lowest TopK that does not hurt badly",
        configuration=PLAIN[masks],
        figures=figures,
        verdict=lowest(badly, LOWEST_TOPK),
    )


def needs_compression_at_inference(judge: Judge, levels: Levels, masks: Masks) -> Claim:
    """Where a model does not work well even with compression, there is nothing to lose without."""

    def finding(measured: Measured) -> Finding:
        useless = judge.hurts_badly(measured.on).holds
        return Finding(None, "on is bad too") if useless else judge.worse(measured.off, measured.on)

    figures, verdict = at_every_strength(
        {level_name(level): finding(measured) for level, measured in levels.items()},
        {level_name(level): f"{judge.show(each.off)} / {judge.show(each.on)}" for level, each in levels.items()},
    )
    return Claim(
        text="A model trained with TopK works well only if compression stays on at inference",
        configuration=f"{PLAIN[masks]}: off / on",
        figures=figures,
        verdict=verdict,
    )


def mask_should_be_reused(judge: Judge, topk: Mapping[Masks, Levels]) -> Claim:
    figures, verdict = _pairs(judge, judge.worse, topk["own masks"], topk["mask reused"])
    return Claim(
        text="The backward pass should reuse the forward mask (and sends no positions)",
        configuration="TopK in both directions: own masks / mask reused",
        figures=figures,
        verdict=verdict,
    )


def feedback_does_not_help(judge: Judge, feedback: Feedback, with_it: Levels, plain: Levels, masks: Masks) -> Claim:
    figures, verdict = _pairs(judge, judge.not_better, with_it, plain)
    return Claim(
        text=f"Error feedback does not help training: {feedback}",
        configuration=f"{WITH_FEEDBACK[masks]} / the same without memory",
        figures=figures,
        verdict=verdict,
    )


def feedback_frees_inference(judge: Judge, feedback: Feedback, with_it: Levels, plain: Levels, masks: Masks) -> Claim:
    """Only where plain TopK cannot be switched off is there something to be freed from."""

    def finding(measured: Measured, without: Measured) -> Finding:
        bound, badly = judge.hurts_badly(without.off), judge.hurts_badly(measured.off)
        if not bound.holds:
            return Finding(None, f"plain off is {bound.words}" if bound.holds is False else bound.words)
        if badly.holds is not False:
            return Finding(False, "off is bad") if badly.holds else badly
        drops = [off - on for off, on in zip(judge.lost(measured.off), judge.lost(measured.on), strict=True)]
        dropped = judge.above(ALMOST_NONE, drops, "off is much worse than on", "off is as good as on")
        return dropped if dropped.holds is None else Finding(not dropped.holds, dropped.words)

    shared = [level for level in with_it if level in plain]
    figures, verdict = at_every_strength(
        {level_name(level): finding(with_it[level], plain[level]) for level in shared},
        {
            level_name(level): " / ".join(
                judge.show(losses) for losses in (with_it[level].off, with_it[level].on, plain[level].off)
            )
            for level in shared
        },
    )
    return Claim(
        text=f"Error feedback lets compression be switched off at inference with almost no drop: {feedback}",
        configuration=f"{WITH_FEEDBACK[masks]}: off / on / off without memory",
        figures=figures,
        verdict=verdict,
    )


def aqsgd_hurts(judge: Judge, with_it: Levels, plain: Levels, masks: Masks) -> Claim:
    """It must be the memory that hurts: where TopK of the same share hurts as much without it, it is not."""
    badly = {level: judge.hurts_badly(measured.best) for level, measured in with_it.items()}
    against_plain = {level: judge.worse(each.best, plain[level].best) for level, each in with_it.items()}
    verdict = lowest(badly, LOWEST_AQSGD)
    stronger = against_plain[max(level for level in with_it if level < LOWEST_AQSGD)]
    if verdict.ruling == "reproduced" and stronger.holds is not True:
        verdict = Verdict("not decided", f"against plain TopK of the same share {stronger.words}")
    figures = "<br>".join(
        f"{level_name(level)}: {judge.show(each.best)} / {judge.show(plain[level].best)}: {badly[level].words}, "
        f"against plain {against_plain[level].words}"
        for level, each in with_it.items()
    )
    return Claim(
        text=f"TopK with AQ-SGD hurts badly below {LOWEST_AQSGD:.0%}",
        configuration=f"{WITH_AQSGD[masks]} / the same without memory",
        figures=figures,
        verdict=verdict,
    )


Rule = Callable[[Sequence[float], Sequence[float]], Finding]


def _pairs(judge: Judge, rule: Rule, first: Levels, second: Levels) -> tuple[str, Verdict]:
    shared = [level for level in first if level in second]
    return at_every_strength(
        {level_name(level): rule(first[level].best, second[level].best) for level in shared},
        {level_name(level): f"{judge.show(first[level].best)} / {judge.show(second[level].best)}" for level in shared},
    )


def level_name(level: float) -> str:
    return f"{level:.0%}" if level < 1 else f"{level:g} bits"
