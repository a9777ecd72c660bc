"""Draw assets/placement.svg: three placements of the groups on eight slots, computed with the placement grammar.

python tools/make_placement_drawing.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_lite.scheduler.placement import parse_placement

NUM_SLOTS = 8
OUT = Path(__file__).resolve().parents[1] / "assets" / "placement.svg"
COLOURS = {"env": "#2e8b57", "rollout": "#d9822b", "actor": "#1f5fa8"}
PANELS = {
    "collocated": ({"actor,rollout,env": "all"}, "everything everywhere;\nthe groups take turns"),
    "disaggregated": ({"env": "0-1", "rollout": "2-3", "actor": "4-7"}, "each group has slots\nof its own"),
    "hybrid": (
        {"actor": "0-7", "env": "0-3", "rollout": "4-7"},
        "env and rollout side by side,\nthen the actor on all",
    ),
}
LEFT, CELL, ROW = 4.3, 0.9, 0.62


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "placement"  # makes the file reproducible
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(len(PANELS), figsize=(9.2, 6.6), facecolor="white")
    for axes, (title, (lines, remark)) in zip(all_axes, PANELS.items(), strict=True):
        _draw_panel(axes, title, lines, remark)
    figure.tight_layout(h_pad=1.2)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})
    print(f"written to {OUT}")


def _draw_panel(axes: Any, title: str, lines: dict[str, str], remark: str) -> None:
    axes.set_xlim(0, LEFT + NUM_SLOTS * CELL + 0.1)
    axes.set_ylim(-3 * ROW - 0.1, 0.62)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.text(0, 0.3, title, fontsize=13, fontweight="bold", va="center")
    text = "\n".join(f"{names}: {spec}" for names, spec in lines.items())
    axes.text(0, -0.1, text, fontsize=10, family="monospace", va="top", linespacing=1.5)
    axes.text(0, -3 * ROW + 0.02, remark, fontsize=9, color="0.35", va="bottom")
    for slot in range(NUM_SLOTS):
        label = f"slot {slot}" if slot == 0 else str(slot)
        axes.text(LEFT + (slot + 0.5) * CELL, 0.3, label, fontsize=9, color="0.35", ha="center", va="center")
    placed = {name.strip(): spec for names, spec in lines.items() for name in names.split(",")}
    for row, (component, colour) in enumerate(COLOURS.items()):
        top = -row * ROW
        axes.text(LEFT - 0.15, top - ROW / 2, component, fontsize=10, ha="right", va="center", color=colour)
        for slot in range(NUM_SLOTS):
            _cell(axes, slot, top, "0.96", "")
        for process in parse_placement(placed[component], NUM_SLOTS):
            for slot in process.slots:
                _cell(axes, slot, top, colour, str(process.rank))


def _cell(axes: Any, slot: int, top: float, colour: str, rank: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y, gap = LEFT + slot * CELL, top - ROW, 0.05
    box = FancyBboxPatch(
        (x + gap, y + gap),
        CELL - 2 * gap,
        ROW - 2 * gap,
        boxstyle="round,pad=0,rounding_size=0.08",
        fc=colour,
        ec="none",
    )
    axes.add_patch(box)
    axes.text(x + CELL / 2, y + ROW / 2, rank, fontsize=10, color="white", ha="center", va="center")


if __name__ == "__main__":
    main()
