"""How many more tokens than dense, and how much less time over slow links, until the loss that dense comes to."""

from collections.abc import Sequence

from benchmarks.convergence.clock import Curve, Rates, Times, key, tokens_to
from benchmarks.convergence.results import Result

QUESTION = "steps to loss"


def branches(results: Sequence[Result], method: str) -> Curve:
    """Tokens, and the loss at the end of the branch, by length."""
    found = [
        (result.tokens, result.loss)
        for result in results
        if result.question == QUESTION and result.name.startswith(f"{method}, ") and "times" in result.name
    ]
    return sorted(found)


def times_the_tokens(results: Sequence[Result], method: str) -> float | None:
    """Those of dense that it needs; None: none of its branches comes down to dense's loss, or there is no such run."""
    of_dense = branches(results, "dense")
    if not of_dense:
        return None
    ((dense_tokens, target),) = of_dense
    tokens = tokens_to(target, branches(results, method))
    return None if tokens is None else tokens / dense_tokens


def tokens_table(results: Sequence[Result], method: str) -> list[str]:
    points = branches(results, method)
    if not (points and branches(results, "dense")):
        return []
    ((dense_tokens, target),) = branches(results, "dense")
    needed = times_the_tokens(results, method)
    return [
        f"## Tokens to the loss of dense: {method}",
        "",
        f"A constant rate, then a fifth of all steps in which it falls: dense comes to {target:.4f}. One seed.",
        "",
        "| times dense's tokens | validation loss | against dense, % |",
        "|---:|---:|---:|",
        *(
            f"| {tokens / dense_tokens:.2f} | {loss:.4f} | {100 * (loss / target - 1):+.2f} |"
            for tokens, loss in points
        ),
        "",
        "None of these lengths is enough." if needed is None else f"**{needed:.2f} times the tokens are enough.**",
        "",
    ]


def time_table(results: Sequence[Result], times: Times, method: str, fewer_bytes: float, rates: Rates) -> list[str]:
    """The bound is Amdahl's: as if only the time that dense spends communicating shrank, by as much as the bytes."""
    runs = times.runs
    if not {"dense", method} <= runs.keys():
        return []
    needed = times_the_tokens(results, method)
    lines = [
        f"## Time of a step and to the loss of dense: {method}",
        "",
        "Seconds of a step: four processes of one machine behind emulated lines, 40 ms there and back.",
        "",
        f"| Mbps | dense | of it communicating | {method} | steps faster | bound | share of it |"
        + ("" if needed is None else " to the loss faster |"),
        "|---:|---:|---:|---:|---:|---:|---:|" + ("" if needed is None else "---:|"),
    ]
    alone = runs["dense"].seconds[key(None)]
    for rate in map(key, rates):
        whole, ours = runs["dense"].seconds[rate], runs[method].seconds[rate]
        bound, faster = whole / (alone + (whole - alone) / fewer_bytes), whole / ours
        lines.append(
            f"| {rate} | {whole:.2f} | {max(0.0, 100 * (1 - alone / whole)):.1f} % | {ours:.3f} | {faster:.1f} | "
            f"{bound:.1f} | {faster / bound:.2f} |" + ("" if needed is None else f" {faster / needed:.1f} |")
        )
    return [*lines, ""]
