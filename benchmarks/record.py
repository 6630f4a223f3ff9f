"""What results carry with them: the command that made them, and rows as CSV."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvt.files import atomic_write


def portable_command(argv: Sequence[str]) -> str:
    """The command as a reader would type it: paths outside the project become DATA/name."""
    script, *arguments = argv
    shown = []
    for argument in arguments:
        before, sign, path = argument.rpartition("=")  # NAME=FOLDER, --option=FILE
        elsewhere = Path(path).is_absolute() or path.startswith("..")
        shown.append(f"{before}{sign}DATA/{Path(path).name}" if elsewhere else argument)
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *shown])


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows with the same columns, as a file that other programs read."""
    with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
