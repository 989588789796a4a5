"""What the measurements say: a table, means, plots, and what got slower than a baseline."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from contenders import FRESH, OUT
from shapes import PASSES, Case

__all__ = ["Row", "markdown", "plot", "regressions", "rows", "summary"]


class Row(NamedTuple):
    """One operation of one case; times in seconds."""

    case: Case
    operation: str
    nbytes: int  # that have to move at least
    copy: float  # of x: reads and writes it
    copy_spread: tuple[float, float]  # quartiles
    out: float  # ours, into a given output
    out_spread: tuple[float, float]
    fresh: float  # ours, as the rivals
    rivals: dict[str, float]

    @property
    def to_copy(self) -> float:
        """Time as a multiple of the copy's."""
        return self.out / self.copy

    @property
    def percent(self) -> float:
        """Bytes a second in percent of the copy's."""
        copied = 2 * self.nbytes / PASSES[self.operation]
        return 100 * (self.nbytes / self.out) / (copied / self.copy)

    @property
    def worst(self) -> float:
        """Time of the fastest rival as a multiple of ours; infinite without rivals."""
        return min(self.rivals.values(), default=float("inf")) / self.fresh

    def __str__(self) -> str:
        return f"{self.case}, {self.operation}"


def rows(results: list[dict[str, Any]]) -> list[Row]:
    """The operations of all cases, as they are in a record's "results"."""
    found = []
    for result in results:
        case = Case(**{**result["case"], "shape": tuple(result["case"]["shape"])})
        copy = result["copy"]
        for operation, times in result["operations"].items():
            ours = times[OUT]
            found.append(
                Row(
                    case, operation, PASSES[operation] * result["bytes"],
                    copy["median"], (copy["low"], copy["high"]),
                    ours["median"], (ours["low"], ours["high"]), times[FRESH]["median"],
                    {n: t["median"] for n, t in times.items() if n not in (OUT, FRESH)},
                )
            )  # fmt: skip
    return found


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _names(found: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in found for name in row.rivals))


def markdown(found: list[Row]) -> str:
    """A table of all rows, those that lose against a rival first."""
    names = _names(found)
    head = ["case", "operation", "time", "quartiles", "fresh", "GB/s", "% of copy", "× copy"]
    lines = [f"| {' | '.join(head + names)} |", "|---" * (len(head) + len(names)) + "|"]
    losing = sorted((row for row in found if row.worst < 1), key=lambda row: row.worst)
    for row in losing + [row for row in found if row.worst >= 1]:
        cells = [
            str(row.case), row.operation, _time(row.out),
            " to ".join(_time(t) for t in row.out_spread), _time(row.fresh),
            f"{row.nbytes / row.out * 1e-9:.1f}", f"{row.percent:.0f}", f"{row.to_copy:.2f}",
            *(f"{row.rivals[n] / row.fresh:.2f}" if n in row.rivals else "" for n in names),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(found: list[Row], large: int) -> str:
    """Geometric means and worst cases; `large` bytes of x are what no cache holds."""
    lines = []
    for name in _names(found):
        ratios = {str(row): row.rivals[name] / row.fresh for row in found if name in row.rivals}
        worst = min(ratios, key=ratios.__getitem__)
        slower = sum(ratio < 1 for ratio in ratios.values())
        lines.append(
            f"{name}: its time is {statistics.geometric_mean(ratios.values()):.2f} times ours "
            f"(geometric mean of {len(ratios)}); we lose {slower}, worst {worst}: "
            f"{ratios[worst]:.2f}"
        )
    for operation in PASSES:
        some = [
            row
            for row in found
            if row.operation == operation and row.nbytes >= large * PASSES[operation]
        ]
        if some:
            worst_row = max(some, key=lambda row: row.to_copy)
            mean = statistics.geometric_mean(row.to_copy for row in some)
            lines.append(
                f"{operation}, x of {large >> 20} MB and more: {mean:.2f} × the copy of x "
                f"(geometric mean of {len(some)}), worst {worst_row.case}: {worst_row.to_copy:.2f}"
            )
    return "\n".join(lines)


def plot(found: list[Row], title: str, path: Path) -> list[Path]:
    """Two pictures, `path` with -copy.png and -rivals.png behind it."""
    from matplotlib.figure import Figure

    if not found:
        return []
    written = []
    styles = {"forward": "o", "inference": "^", "backward": "s"}
    for kind in ("copy", "rivals"):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.add_subplot()
        for operation, marker in styles.items():
            some = [row for row in found if row.operation == operation]
            sizes = [row.nbytes / PASSES[operation] / 1e6 for row in some]
            if kind == "copy":
                axes.plot(sizes, [row.percent for row in some], marker, ms=5, alpha=0.6,
                          label=operation)  # fmt: skip
                continue
            for number, name in enumerate(_names(found)):
                points = [
                    (size, row.rivals[name] / row.fresh)
                    for size, row in zip(sizes, some, strict=True)
                    if name in row.rivals
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), marker, ms=5, alpha=0.6,
                              color=f"C{number}", label=f"{name}, {operation}")  # fmt: skip
        axes.axhline(100 if kind == "copy" else 1, color="black", lw=1)
        axes.set(xscale="log", xlabel="size of x in MB", title=title)
        if kind == "copy":
            axes.set(ylabel="bytes a second in % of a copy's", ylim=(0, None))
        else:
            axes.set(yscale="log", ylabel="the rival's time ÷ cunorm's")
        axes.grid(alpha=0.3, which="both")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        target = path.with_name(f"{path.name}-{kind}.png")
        figure.savefig(target, dpi=110)
        written.append(target)
    return written


def regressions(now: list[Row], before: list[Row]) -> list[tuple[Row, str]]:
    """What takes more copies' time than in a baseline, by more than both runs' noise; and a text.

    Noise is, first, what the machine does to all: the median change of cases of about the same
    size, for copies from a shared cache are a matter of luck. Then the spread in both runs: the
    least of now, a lower quartile beside the copy's upper one, against the most of then. And
    a quarter, which is what one case in two runs may differ by on a shared machine.
    """
    old = {(row.case, row.operation): row for row in before}
    pairs = [(row, old[row.case, row.operation]) for row in now if row[:2] in old]
    changes: dict[int, list[float]] = {}
    for row, was in pairs:
        changes.setdefault(_size_class(row), []).append(row.to_copy / was.to_copy)
    found = []
    for row, was in pairs:
        drift = max(1.0, statistics.median(changes[_size_class(row)]))
        least = row.out_spread[0] / row.copy_spread[1] / drift
        most = was.out_spread[1] / was.copy_spread[0]
        if least > most and row.to_copy > 1.25 * drift * was.to_copy:
            text = f"{row}: {was.to_copy:.2f} × the copy before, {row.to_copy:.2f} now"
            found.append((row, text))
    return found


def _size_class(row: Row) -> int:
    return (row.case.elements.bit_length() + 1) // 3
