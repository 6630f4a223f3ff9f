"""Draw the diagrams of the site as SVG: python docs/site/figures.py."""

from __future__ import annotations

from pathlib import Path

from hvt.costs import Cost, arrow, cost

DOCS = Path(__file__).parents[1]
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.head { font-weight: 600 }
.middle { text-anchor: middle }
.back { fill: #fefefe }
.box { fill: #ddf4ff; stroke: #0969da }
.pool { fill: #fff8c5; stroke: #9a6700 }
.plain { fill: #f6f8fa; stroke: #59636e }
.line { stroke: #59636e; fill: none }
.on { fill: #0969da }
.off { fill: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .back { fill: #0d1117 }
  .box { fill: #121d2f; stroke: #4493f8 } .pool { fill: #272115; stroke: #d29922 }
  .plain { fill: #151b23; stroke: #9198a1 } .line { stroke: #9198a1 }
  .on { fill: #4493f8 } .off { fill: #3d444d }
}
</style>"""


def main() -> None:
    draw("concepts/architecture.svg", architecture("hvt_s_4"))
    draw("concepts/windows.svg", windows())
    draw("hierarchy.svg", hierarchy("deit_s", "hvt_s_1", "hvt_s_4"))


def draw(path: str, figure: tuple[float, float, list[str]]) -> None:
    width, height, shapes = figure
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    back = f'<rect class="back" width="{width:g}" height="{height:g}"/>'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, back, *shapes, "</svg>"]
    (DOCS / path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" {place} rx="3"/>'


def architecture(name: str) -> tuple[float, float, list[str]]:
    """A model from left to right, the paper's Figure 2: a box for each run of blocks."""
    price = cost(name)
    tokens = [count for count, _ in price.blocks()]
    x, middle, shapes = 12.0, 90.0, list[str]()

    def box(width: float, height: float, kind: str, first: str, second: str) -> None:
        nonlocal x
        if shapes:
            shapes.append(f'<path class="line" d="M{x:g} {middle:g} h10 m-4 -3 l4 3 l-4 3"/>')
            x += 12
        shapes.append(rect(x, middle - height / 2, width, height, kind))
        shapes.append(text(x + width / 2, middle - 3, first, "middle"))
        shapes.append(text(x + width / 2, middle + 13, second, "small middle"))
        x += width

    box(74, 48, "plain", "patches", "+ positions")
    for stage, count in enumerate(price.tokens):
        if stage:
            box(46, 48, "pool", "pool", "3 / 2")
        blocks = tokens.count(count)
        height = 40 + 64 * count / price.tokens[0]
        box(76, height, "box", f"{blocks} block{'s' * (blocks > 1)}", f"{count} tokens")
    box(64, 40, "plain", "average", "of tokens")
    box(56, 40, "plain", "linear", "classes")
    note = "After each pooling (kernel 3, stride 2), a new positional embedding is added."
    return x + 12, 172, [text(12, 22, f"{name}: {note}", "small"), *shapes]


def windows() -> tuple[float, float, list[str]]:
    """The patches that one pooled token covers, on grids of 8 × 8."""
    square = {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    grids = (
        ("1D: the sequence", "kernel 3, stride 2", {(0, 6), (0, 7), (1, 0)},
         "a window may continue in the next row"),
        ("1D after four poolings", "31 patches in sequence", {divmod(i, 8) for i in range(16, 47)},
         "one token covers a band of rows"),
        ("2D: the grid", "kernel 3 × 3, stride 2 × 2", square,
         "one token covers a square"),
    )  # fmt: skip
    shapes, side, step = list[str](), 22, 232
    for index, (title, window, covered, note) in enumerate(grids):
        left = 12 + index * step
        shapes += [text(left, 22, title, "head"), text(left, 38, window, "small")]
        for row in range(8):
            for column in range(8):
                kind = "on" if (row, column) in covered else "off"
                shapes.append(rect(left + side * column, 50 + side * row, 19, 19, kind))
        shapes.append(text(left, 50 + 8 * side + 16, note, "small"))
    return 12 + 3 * step - 16, 256, shapes


def hierarchy(*names: str) -> tuple[float, float, list[str]]:
    """MACs of each block of some models, a panel for each."""
    prices = [cost(name) for name in names]
    largest = max(macs for price in prices for _, macs in price.blocks())
    shapes, step = list[str](), 236
    for index, (name, price) in enumerate(zip(names, prices, strict=True)):
        shapes += _panel(12 + index * step, name, price, prices[0], largest)
    return 12 + len(names) * step, 216, shapes


def _panel(left: float, name: str, price: Cost, first: Cost, largest: int) -> list[str]:
    total = f"{price.gflops:.2f} G MACs"
    if price is not first:
        total += f", {first.macs / price.macs:.1f} × fewer"
    shapes = [text(left, 22, name, "head"), text(left, 39, total, "small")]
    for block, (_, macs) in enumerate(price.blocks()):
        height = 120 * macs / largest
        shapes.append(rect(left + 17.5 * block, 180 - height, 14, height, "on"))
    shapes.append(text(left, 200, f"tokens: {arrow(price.tokens)}", "small"))
    return shapes


if __name__ == "__main__":
    main()
