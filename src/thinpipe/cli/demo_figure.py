"""What the runs of `thinpipe demo` have logged, and the picture of it (needs the extra `report`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

from thinpipe.core.events import AnyEvent, Step
from thinpipe.core.hub_events import GenerationStarted, PeerJoined, PeerLeft
from thinpipe.report.figures import BLUE, GREY, INK, ORANGE, legend, pyplot, save_png, style_axes


@dataclass(frozen=True)
class Curve:
    """The steps of a run, from its first step on."""

    seconds: list[float]
    steps: list[int]
    losses: list[float]
    tokens: list[int]
    nbytes_per_token: float
    """Of one boundary, both directions; 0 without processes."""
    began: float
    """Time of the first step."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Curve":
        first, last = steps[0], steps[-1]
        boundaries = {link.boundary for link in last.links}
        tokens = last.tokens_per_second * last.seconds
        return cls(
            seconds=[step.time_s - first.time_s for step in steps],
            steps=[step.step for step in steps],
            losses=[step.loss for step in steps],
            tokens=[step.tokens for step in steps],
            nbytes_per_token=sum(link.nbytes for link in last.links) / max(1, len(boundaries)) / tokens,
            began=first.time_s,
        )

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return (self.tokens[-1] - self.tokens[0]) / max(1e-9, self.seconds[-1])


@dataclass(frozen=True)
class KilledPeer:
    """A peer that was killed."""

    name: str
    killed_at: float
    step: int
    """Last step before."""
    back_at: float | None = None
    """When the hub saw it again."""
    working_again_at: float | None = None
    """Time of the first step after."""
    from_step: int = 0
    """Commit from which the run went on."""

    @classmethod
    def of(cls, events: Sequence[AnyEvent], killed_at: float) -> "KilledPeer":
        later = [event for event in events if event.time_s > killed_at]
        left = next((event for event in later if isinstance(event, PeerLeft)), None)
        since = left.time_s if left is not None else killed_at
        joined = next((event for event in later if isinstance(event, PeerJoined)), None)
        generation = next((event for event in later if isinstance(event, GenerationStarted)), None)
        step = next((e for e in later if isinstance(e, Step) and generation and e.time_s > generation.time_s), None)
        return cls(
            name="" if left is None else left.peer,
            killed_at=killed_at,
            step=max((event.step for event in events if isinstance(event, Step) and event.time_s <= since), default=0),
            back_at=None if joined is None else joined.time_s,
            working_again_at=None if step is None else step.time_s,
            from_step=0 if generation is None else generation.step,
        )


def _with_gaps(curve: Curve) -> tuple[list[float], list[float]]:
    """Seconds and steps, with a gap wherever the run goes back."""
    places, steps = curve.seconds[:1], [float(step) for step in curve.steps[:1]]
    for place, before, step in zip(curve.seconds[1:], curve.steps, curve.steps[1:], strict=False):
        if step <= before:
            places, steps = [*places, place], [*steps, nan]
        places, steps = [*places, place], [*steps, float(step)]
    return places, steps


def draw_demo(thick: Curve, thin: Curve, friends: Curve, killed: KilledPeer, *, links: str, path: Path) -> None:
    plt = pyplot()
    with plt.rc_context({"font.size": 9, "axes.labelcolor": INK, "text.color": INK}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
    for axes in (left, right):
        style_axes(axes)
    for curve, colour, label in ((thick, ORANGE, "whole"), (thin, BLUE, "thin")):
        words = f"{label}: {curve.nbytes_per_token:,.0f} bytes a token, {curve.speed:,.0f} tokens/s"
        left.plot(curve.seconds, curve.losses, color=colour, linewidth=1.8, label=words)
    left.set(xlabel="seconds", ylabel="loss, nats per token")
    left.set_title(f"four processes behind links of {links}", fontsize=9.5)
    legend(left, loc="upper right")
    right.plot(*_with_gaps(friends), color=BLUE, linewidth=1.8)
    right.yaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="seconds", ylabel="step")
    right.set_title("four peers of a hub: one is killed and comes back", fontsize=9.5)
    killed_s = killed.killed_at - friends.began
    end = friends.seconds[-1] if killed.working_again_at is None else killed.working_again_at - friends.began
    right.axvspan(killed_s, end, color=GREY, alpha=0.2, linewidth=0)
    marks = [(killed_s, f"{killed.name} killed")]
    if killed.back_at is not None:
        marks.append((killed.back_at - friends.began, "back"))
    for place, words in marks:
        right.axvline(place, color=ORANGE, linewidth=1.0)
        right.annotate(words, (place, 0.02), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="bottom")
    if killed.working_again_at is not None:
        right.annotate(
            f"goes on from\nstep {killed.from_step}",
            (end, killed.from_step),
            xytext=(-6, -4),
            textcoords="offset points",
            ha="right",
            va="top",
        )
    save_png(figure, path)
