"""The table and the figure of `benchmarks.plan_reality`, from what its runs left."""

from pathlib import Path
from statistics import median

from benchmarks.plan_reality import SETTINGS, WITHOUT_LINES, Compared, Kept, calibrate_from, compare, config_of
from thinpipe.core.files import write_atomically
from thinpipe.report.figures import pyplot


def report(kept: Kept, data: Path, output: Path) -> None:
    config = config_of(SETTINGS[0], data, Path("run"), steps=kept.steps)
    calibration = calibrate_from(kept, data)
    rows = [compare(setting, kept, calibration, data) for setting in SETTINGS]
    without_lines = calibrate_from(kept, data, WITHOUT_LINES)
    otherwise = [compare(setting, kept, without_lines, data) for setting in SETTINGS]
    shares = [
        tensors / there
        for row in rows
        for run in row.runs
        for tensors, there in zip(row.tensors_nbytes, run.memory_nbytes, strict=True)
    ]
    software = ", ".join(f"{key} {value}" for key, value in kept.versions.items())
    tokens = config.training.global_batch_size * config.training.seq_len
    lines = [
        "# Plans against reality",
        "",
        "```",
        "python -m benchmarks.plan_reality --data TOKENS",
        "```",
        "",
        f"Llama of 8 blocks, d = 256, batches of {config.training.global_batch_size} x {config.training.seq_len} in "
        f"micro-batches of {config.microbatch_size}, {kept.steps} steps of which the first two are left out, one "
        f"thread a process, {kept.cores:g} cores. {software}.",
        "",
        "The machine, from two runs behind lines of 1 Gbps, of two and of eight processes, the middle of five each: "
        f"{calibration.flops / 1e9:.1f} GFLOP/s a process, {calibration.pass_s * 1e3:.1f} ms a pass beside its "
        f"operations, {calibration.overhead_nbytes / 1e6:.0f} MB beside tensors. Nothing else is fitted.",
        "",
        _words("tokens/s, against the middle one of each setting's runs", [row.speed_error for row in rows]),
        *(
            _words(f"tokens/s, against pass {repeat + 1} alone", [row.single_error(repeat) for row in rows])
            for repeat in range(min(len(row.runs) for row in rows))
        ),
        _words(
            "tokens/s, had the two runs been without lines",
            [row.speed_error for row in otherwise],
        ),
        f"- runs of one setting differ from their middle one by up to {median(row.noise for row in rows):.1%} in the "
        f"median of settings, {max(row.noise for row in rows):.1%} at worst",
        _words("peak memory, worst process", [row.memory_error for row in rows]),
        f"- of that memory, tensors that are planned: {min(shares):.0%} to {max(shares):.0%}",
        "",
        "| setting | tokens/s planned | measured | off | the same again | stolen by the host | memory off |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        measured = ", ".join(f"{tokens / run.seconds:,.0f}" for run in row.runs)
        lines.append(
            f"| {row.name} | {tokens / row.seconds:,.0f} | {measured} | {row.speed_error:+.1%} | {row.noise:.1%} | "
            f"{max(run.stolen for run in row.runs):.0%} | {row.memory_error:+.1%} |"
        )
    lines += ["", "![planned and measured](plan_reality.png)", ""]
    write_atomically(output / "plan_reality.md", "\n".join(lines).encode())
    _draw(rows, tokens, output / "plan_reality.png")
    print("\n".join(lines))


def _words(what: str, errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return (
        f"- {what}: {median(sizes):.1%} off in the median, {max(sizes):.1%} at worst; {median(errors):+.1%} with signs"
    )


def _draw(rows: list[Compared], tokens: int, path: Path) -> None:
    plt = pyplot()
    figure, (speeds, memories) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    for row in rows:
        colour = "#d95f02" if "dense" in row.name else "#08519c"
        marker = {"2": "o", "4": "s", "8": "^"}[row.name[0]]
        for run in row.runs:
            speeds.plot(tokens / run.seconds, tokens / row.seconds, marker, color=colour, alpha=0.7)
            memories.plot(max(run.memory_nbytes) / 1e9, max(row.memory_nbytes) / 1e9, marker, color=colour, alpha=0.7)
    for axes, title in ((speeds, "tokens per second"), (memories, "peak memory of the largest process, GB")):
        low, high = min(*axes.get_xlim(), *axes.get_ylim()), max(*axes.get_xlim(), *axes.get_ylim())
        axes.plot([low, high], [low, high], color="#636363", linewidth=1)
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#bdbdbd", alpha=0.35)
        axes.set(xlabel="measured", ylabel="planned", title=title, xlim=(low, high), ylim=(low, high))
        axes.spines[["top", "right"]].set_visible(False)
    for words, marker in (("2 stages", "o"), ("4 stages", "s"), ("8 stages", "^")):
        speeds.plot([], [], marker, color="#636363", label=words)
    speeds.plot([], [], "-", color="#d95f02", label="dense")
    speeds.plot([], [], "-", color="#08519c", label="subspace")
    speeds.fill_between([], [], color="#bdbdbd", alpha=0.35, label="within 10 %")
    speeds.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
