"""Train three models of equal cost on handwritten digits, compare them, and predict.

make quickstart
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvt._openmp import wait_briefly
from hvt.training.interrupt import Interrupted

# Without pooling, the same blocks cost as much at two thirds of the width.
MODELS = {
    "DeiT": {"class_token": True, "stages": 0, "num_heads": 2},
    "HVT, no pooling": {"stages": 0, "num_heads": 2},
    "HVT": {},
}


def main() -> None:
    # As the commands do, before torch is imported: threads that spin collapse on a busy CPU.
    wait_briefly()
    # Here and not at the top, so that Ctrl-C is quiet while torch is imported.
    from rich.console import Console
    from rich.table import Table

    import hvt
    from hvt.data.sources import open_data
    from hvt.deploy.predict import Predictor
    from hvt.training.engine import train
    from hvt.training.recipe import load_recipe
    from hvt.training.trainer import Result
    from hvt.training.watch import clock, draw_curves

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/quickstart", help="folder for the results")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    args = parser.parse_args()
    console, folder = Console(), Path(args.output)
    recipe = load_recipe("digits")
    if args.epochs:
        recipe = recipe.replace(epochs=args.epochs)

    results: dict[str, Result] = {}
    for name, overrides in MODELS.items():
        number, short = 1, name.lower().replace(", ", "-").replace(" ", "-")
        while (output := folder / f"{short}-{number}").exists():
            number += 1  # every quickstart is a new run
        console.rule(f"{name} on digits")
        results[name] = train(recipe.replace(overrides, output=str(output)), console=console)

    table = Table("model", "tokens", box=None, header_style="bold")
    for heading in ("width", "M MACs", "K parameters", "test top-1", "time"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        cost = hvt.cost(result.model)
        table.add_row(
            name,
            " → ".join(map(str, cost.tokens)),
            str(result.model.config.width),
            f"{cost.macs / 1e6:.1f}",
            f"{cost.params / 1e3:.0f}",
            f"{result.top1:.2f} %",
            clock(result.seconds),
        )
    console.rule("equal cost, same recipe")
    console.print(table)
    deit, unpooled, hvt_top1 = (result.top1 for result in results.values())
    console.print(
        f"due to the average head instead of a class token: {unpooled - deit:+.2f} points\n"
        f"due to pooling, which pays for the width: {hvt_top1 - unpooled:+.2f} points",
        highlight=False,
    )
    if draw_curves(folder / "curves.png", {n: r.rows for n, r in results.items()}):
        console.print(f"curves: {folder / 'curves.png'}", highlight=False)

    console.rule("the HVT on a few test images")
    images = open_data("digits").val
    predictor = Predictor(results["HVT"].model, top=2)
    for index in range(5):
        image, label = images[index]
        answer = predictor(image)
        said = ", ".join(f"{g.name} ({100 * g.probability:.0f} %)" for g in answer.top)
        console.print(f"a {label}: {said}", highlight=False)
    console.print(
        f"\nPredict your own: hvt predict {results['HVT'].folder}/model.safetensors IMAGE",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(130)
