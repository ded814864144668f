"""Chart of the seconds of a save and of a load, by client, over http and TLS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmark.report.plan import HTTP, RAW, TLS
from tests.benchmark.report.rows import Results, Row, median


def draw(results: Results, path: Path) -> None:
    """Write a PNG: a panel for each server, a pair of bars for each client on one rank."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [section for section in results.sections() if section in (HTTP, TLS)] or results.sections()[:1]
    figure, axes = plt.subplots(1, len(shown), figsize=(5.2 * len(shown), 3.4), squeeze=False)
    for axis, section in zip(axes[0], shown, strict=True):
        names = [name for name in _clients(results.rows, section) if name != RAW]
        for shift, action in ((-0.2, "save"), (0.2, "load")):
            medians = [median(results.select(section, name, action), lambda row: row.wall_seconds) for name in names]
            places = [place + shift for place in range(len(names))]
            bars = axis.barh(places, [seconds or 0.0 for seconds in medians], height=0.38, label=action)
            axis.bar_label(bars, [f"{seconds:.2f}" if seconds else "" for seconds in medians], padding=2, fontsize=8)
        axis.set_yticks(range(len(names)), names if section == shown[0] else [""] * len(names))
        axis.invert_yaxis()
        axis.set_xlabel("seconds")
        axis.set_title(f"{section}, one rank")
        axis.margins(x=0.1)
    axes[0][0].legend()
    figure.tight_layout()
    # Without the version of matplotlib in the file, the same figures make the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _clients(rows: Sequence[Row], section: str) -> list[str]:
    return list(dict.fromkeys(row.client for row in rows if row.section == section and row.ranks == 1))
