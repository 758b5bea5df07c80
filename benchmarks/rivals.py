"""Rivals that take turns: how benchmarks time them, and the rows that they print.

In each round every rival has one turn, in one process, in an order drawn anew, so that none profits from what another
leaves in the cache. Times are CPU seconds of the process, which other work on the machine hardly touches, or wall time.
A row holds the first rival's median time a call, and of each other one the median and quartiles, over rounds, of its
time divided by the first one's in the same round.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

Rivals = dict[str, Callable[[], object]]
CLOCKS = {"CPU": time.process_time, "wall": time.perf_counter}
HEADER = "| what | base | ratio to the base: median (quartiles) |\n| --- | --- | --- |"


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Of the command line of a benchmark."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=rounds)
    found.add_argument("--threads", type=int, default=1)
    return found


def race(title: str, rivals: Rivals, rounds: int, *, least: float = 0.0, clocks: Sequence[str] = ("CPU",)) -> None:
    """Print one row a clock. A turn is one call or, for all rivals, as many in a row as take the fastest ``least``
    seconds, so that each has its own data in the cache; calls before the rounds warm up."""
    for run in rivals.values():
        run()
    calls = max(1, math.ceil(least / min(_turn(run, 1)[clocks[0]] for run in rivals.values())))
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in rivals} for clock in CLOCKS}
    order, names = random.Random(0), list(rivals)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            for clock, spent in _turn(rivals[name], calls).items():
                times[clock][name].append(spent)
    for clock in clocks:
        base, *others = times[clock]
        cells = []
        for name in others:
            ratios = [a / b for a, b in zip(times[clock][name], times[clock][base])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{name} **{middle:.3f}** ({low:.3f}-{high:.3f})")
        middle = 1e3 * statistics.median(times[clock][base]) / calls
        shown = title if len(clocks) == 1 else f"{title}, {clock}"
        print(f"| {shown} | {base}: {middle:.2f} ms | {'; '.join(cells)} |", flush=True)


def _turn(run: Callable[[], object], calls: int) -> dict[str, float]:
    """Seconds by clock."""
    begin = {clock: now() for clock, now in CLOCKS.items()}
    for _ in range(calls):
        run()
    return {clock: now() - begin[clock] for clock, now in CLOCKS.items()}
