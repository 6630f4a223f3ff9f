"""`docs/reproduction.md`: every table and claim of the paper with what was measured here.

The text follows from the result files alone, so that a test can tell whether it is current.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..training.recipe import Recipe
from ..training.watch import clock
from .claims import BUDGETS, CLAIMS, Claim, Outcome, Verdict, judge, pooled_spread
from .protocol import CURVE_EPOCHS, SEEDS, Plan, Protocol, macs_of, note, plan
from .results import Finished
from .tables import FIGURE4, Row, Table, get_table, tables

Known = Mapping[str, Sequence[Finished]]
"""Results by training."""

NOT_RUN = "not run"
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "digits", "imagenet": "ImageNet"}
READINGS = {"epochs": "equal epochs", "compute": "equal compute"}


# ── one table with its figures ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Line:
    """A row with what was measured of it in each reading."""

    row: Row
    plans: dict[str, Plan]
    found: dict[str, list[Finished]]

    @property
    def config(self) -> HVTConfig:
        """As it was trained; with PoWER the retention is known afterwards."""
        for results in self.found.values():
            if results:
                return HVTConfig.from_dict(results[0].config)
        return self.plans["epochs"].training.config

    @property
    def macs(self) -> float:
        measured = any(self.found.values())
        return macs_of(self.config) if measured else self.plans["epochs"].training.macs


@dataclass(frozen=True)
class Filled:
    """A table with its figures."""

    table: Table
    data: str
    lines: list[Line]

    @property
    def readings(self) -> tuple[str, ...]:
        """Both, or one where they train every row alike."""
        alike = all(
            line.plans["epochs"].training.key == line.plans["compute"].training.key
            for line in self.lines
        )
        return ("epochs",) if alike else BUDGETS

    @property
    def results(self) -> list[Finished]:
        """Every result once."""
        every = [one for line in self.lines for budget in BUDGETS for one in line.found[budget]]
        return list({one.name: one for one in every}.values())

    def figures(self, budget: str) -> dict[str, list[float]]:
        """Top-1 over seeds by row."""
        return {line.row.name: [one.top1 for one in line.found[budget]] for line in self.lines}


def fill(protocol: Protocol, table: Table, known: Known, data: str | None = None) -> Filled:
    """A table with the results that there are."""
    source = protocol.data_of(table, data)
    lines = []
    for row in table.rows:
        plans = {budget: plan(protocol, row, budget, source) for budget in BUDGETS}
        found = {b: list(known.get(one.training.key, ())) for b, one in plans.items()}
        lines.append(Line(row, plans, found))
    return Filled(table, source, lines)


def cells(filled: Filled) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, as text."""
    printed = [data for data in NAMES if any(data in line.row.top1 for line in filled.lines)]
    headings = ["row", "paper's GFLOPs"]
    headings += [f"paper's {NAMES[data]} top-1" for data in printed]
    headings += ["here", "tokens", "M multiply-adds", "params (M)"]
    for budget in filled.readings:
        headings += [f"top-1, {READINGS[budget]}", "epochs", "time"]
    rows = []
    for line in filled.lines:
        cell = [line.row.name, f"{line.row.gflops:.2f}"]
        cell += [f"{line.row.top1[d]:.2f}" if d in line.row.top1 else "" for d in printed]
        cell += [_size(line.config), _arrow(line.config)]
        cell += [f"{line.macs / 1e6:.1f}", f"{cost(line.config).params_m:.3f}"]
        for budget in filled.readings:
            cell += [_top1(line.found[budget]), _epochs(line.plans[budget])]
            cell.append(_time(line.found[budget]))
        rows.append(cell)
    return headings, rows


def _size(config: HVTConfig) -> str:
    side, patch = config.image[0], config.patch_size
    return f"{side} px, patch {patch}, width {config.width}, {config.depth} blocks"


def _arrow(config: HVTConfig) -> str:
    tokens = list(map(str, config.tokens))
    if len(tokens) > 5:
        tokens = [*tokens[:2], "…", tokens[-1]]
    return " → ".join(tokens)


def _top1(found: Sequence[Finished]) -> str:
    """Mean ± standard deviation over seeds, and their number."""
    if not found:
        return NOT_RUN
    figures = [one.top1 for one in found]
    mean = f"{statistics.fmean(figures):.2f}"
    if len(figures) > 1:
        mean += f" ± {statistics.stdev(figures):.2f}"
    return f"{mean} (n = {len(figures)})"


def _epochs(planned: Plan) -> str:
    training = planned.training
    steps = training.power
    told = f"{training.epochs:g}"
    if steps is not None:
        told = f"{training.recipe.epochs:g} + {steps.search:g} + {steps.retrain:g}"
    if planned.budget == "compute":
        told += f" ({planned.ratio:.2f} × budget)"
    return told


def _time(found: Sequence[Finished]) -> str:
    times = [one.seconds for one in found if one.seconds]
    return clock(statistics.fmean(times)) if times else ""


# ── claims ──────────────────────────────────────────────────────────────────────────────────────


def verdicts(claim: Claim, filled: Filled, noise: float | None) -> dict[str, Verdict]:
    """What was measured of a claim in each reading that it is made for."""
    told = {}
    for budget in BUDGETS:
        verdict = judge(claim, budget, filled.figures(budget), noise)
        if verdict is not None:
            told[budget] = verdict
    return told


def _paragraph(claim: Claim, filled: Filled, noise: float | None) -> str:
    told = verdicts(claim, filled, noise)
    printed = _printed(filled.table, filled.data)
    sentences = [f"**Claim {claim.number}.** {claim.words}"]
    for budget in [b for b in told if b in filled.readings] or list(told):
        verdict = told[budget]
        how = f"At {READINGS[budget]}"
        if verdict.word == NOT_RUN:
            sentences.append(f"{how}: not run yet ({', '.join(verdict.missing)}).")
        else:
            rest = f"; not run: {', '.join(verdict.missing)}" if verdict.missing else ""
            verb = "is not decided" if verdict.word == "not decided" else verdict.word
            sentences.append(f"{how} it **{verb}**{rest}.")
        for outcome in verdict.outcomes:
            sentences.append(_compared(outcome, printed if budget == "epochs" else {}))
    return " ".join(sentences)


def _compared(outcome: Outcome, printed: Mapping[str, float]) -> str:
    one = outcome.comparison
    left, right = outcome.seeds
    told = [f"n = {left} and {right}"]
    if outcome.error is not None:
        told.append(f"standard error {outcome.error:.2f}")
        if not outcome.clear:
            told.append("within the seeds' spread")
    if one.left in printed and one.right in printed:
        told.insert(0, f"paper {printed[one.left] - printed[one.right]:+.2f}")
    sign = ">" if one.strict else "≥"
    wanted = f"wanted {sign} {one.margin:g}"
    points = f"{one.left} − {one.right} = {outcome.difference:+.2f} points"
    return f"{points} ({wanted}; {', '.join(told)})."


def _printed(table: Table, data: str) -> dict[str, float]:
    """The paper's figures to compare with: of the same data where it has them."""
    sources = [data, "cifar100", "imagenet"]
    for source in sources:
        figures = {row.name: row.top1[source] for row in table.rows if source in row.top1}
        if figures:
            return figures
    return {}


# ── the page ────────────────────────────────────────────────────────────────────────────────────


def noise_of(known: Known) -> float | None:
    """The spread over seeds of all trainings together."""
    return pooled_spread([[one.top1 for one in found] for found in known.values()])


def render(protocol: Protocol, known: Known, comments: Path, data: str | None = None) -> str:
    """The page, from the results and from `TABLE.md` in the folder of comments, if there is one."""
    filled = [fill(protocol, table, known, data) for table in tables().values() if table.trained]
    used = {one.name: one for table in filled for one in table.results}
    noise = noise_of(known)
    parts = [
        "# Reproduction",
        "<!-- Written by `hvt paper report` from the result files; do not edit. -->",
        _opening(protocol, filled, list(used.values()), noise),
        "## Claims",
        _claims_table(filled, noise),
        "## Tables",
    ]
    for one in filled:
        parts += _table_part(protocol, one, noise, comments)
    parts += ["## Figures", *_figures_part(protocol, known, comments.name)]
    return "\n\n".join(parts) + "\n"


def _opening(
    protocol: Protocol, filled: Sequence[Filled], used: Sequence[Finished], noise: float | None
) -> str:
    wanted = {
        f"{line.plans[budget].training.key}-{seed}"
        for one in filled
        for line in one.lines
        for budget in BUDGETS
        for seed in SEEDS.get(one.table.name, (0,))
    }
    done = {f"{one.key}-{one.seed}" for one in used} & wanted
    lines = [
        "The paper's tables, with its figures and ours beside them. Every row is trained from "
        "scratch, alike but for the model, under two budgets: *equal epochs*, as the paper trains, "
        "and *equal compute*, where every row gets about the same multiply-adds of training and a "
        "cheap model sees more pictures. Top-1 is that of the last weights on the test pictures in "
        "per cent, with the standard deviation over seeds; no epoch was chosen by it. In the paper "
        "it is that of 300 epochs at 224 pixels, so differences are to be compared, not levels.",
        f"Of {len(wanted)} trainings, {len(done)} have been run"
        + (f", in {clock(_total(used))} in all." if used else "."),
    ]
    if noise is not None:
        lines.append(
            f"Seeds differ by {noise:.2f} points (standard deviation, pooled over all rows with "
            "several seeds); from it follow the standard errors below, also of rows with one seed. "
            "A claim holds *not clearly*, or is *not decided*, where two standard errors could "
            "have turned it round."
        )
    commands = (
        f"```\nhvt paper run all --protocol {protocol.name} --root DATA\n"
        f"hvt paper report --protocol {protocol.name}\n```"
    )
    recipes = [_recipe_part(protocol, data) for data in protocol.recipes]
    return "\n\n".join([*lines, commands, *recipes])


def _recipe_part(protocol: Protocol, data: str) -> str:
    recipe = protocol.recipes[data]
    plain, skipped = Recipe(), ("data", "root", "output", "overrides", "model")
    values = {
        k: v
        for k, v in dataclasses.asdict(recipe).items()
        if v != getattr(plain, k) and k not in skipped
    }
    model = ", ".join(f"{k} {v}" for k, v in recipe.overrides.items()) or "as in the paper"
    told = ", ".join(f"{k} {_value(v)}" for k, v in values.items())
    return (
        f"Protocol `{protocol.name}` on {NAMES[data]}: {told}; the rest is DeiT's recipe. "
        f"Models: {model}; the compute budget is what `{recipe.model}` takes in "
        f"{recipe.epochs:g} epoch{'' if recipe.epochs == 1 else 's'}."
    )


def _value(value: object) -> str:
    return "off" if value in ("", 0, 0.0, False) else str(value)


def _claims_table(filled: Sequence[Filled], noise: float | None) -> str:
    by_name = {one.table.name: one for one in filled}
    rows = []
    for claim in sorted(CLAIMS, key=lambda claim: claim.number):
        told = verdicts(claim, by_name[claim.table], noise)
        words = [told[budget].word if budget in told else "" for budget in BUDGETS]
        link = f"[{claim.table}](#{claim.table})"
        rows.append([claim.number, claim.words, link, *words])
    return markdown(["", "claim", "table", *(READINGS[budget] for budget in BUDGETS)], rows)


def _table_part(protocol: Protocol, one: Filled, noise: float | None, comments: Path) -> list[str]:
    table = one.table
    headings, rows = cells(one)
    parts = [f"### {table.name}", f"{table.place} of the paper: {table.about}."]
    parts.append(markdown(headings, rows, left=1))
    if one.readings == ("epochs",):
        parts.append("Both readings train every row of this table alike, so there is one.")
    notes = [note(line.row, line.plans["epochs"].training.config) for line in one.lines]
    told = [text for text in notes if text]
    if any(line.row.power for line in one.lines):
        told.append(
            "DeiT with PoWER: epochs of DeiT, of the search and of the training after it; at equal "
            "epochs that is more than the other rows have, as in the paper."
        )
    if told:
        parts.append("\n".join(f"- {text}" for text in told))
    parts.append(_provenance(protocol, one))
    parts += [_paragraph(claim, one, noise) for claim in CLAIMS if claim.table == table.name]
    comment = _comment(comments / f"{table.name}.md")
    return parts + ([comment] if comment else [])


def _provenance(protocol: Protocol, one: Filled) -> str:
    command = f"`hvt paper run {one.table.name} --protocol {protocol.name}`"
    found = one.results
    if not found:
        return f"Command: {command}."
    seeds = sorted({result.seed for result in found})
    machines = sorted({_machine(result) for result in found})
    stacks = sorted({_stack(result) for result in found})
    return (
        f"Command: {command}; seeds {', '.join(map(str, seeds))}; {len(found)} trainings, "
        f"{clock(_total(found))} in all; {'; '.join(stacks)}; {'; '.join(machines)}."
    )


def _machine(result: Finished) -> str:
    told = result.machine
    where = told.get("gpu") or told["cpu"]
    processes = told.get("processes", 1)
    several = f" × {processes} processes" if processes > 1 else ""
    threads = told.get("threads")
    return f"{where}, {threads} thread{'' if threads == 1 else 's'}{several}"


def _stack(result: Finished) -> str:
    return ", ".join(f"{name} {result.versions[name]}" for name in ("hvt", "torch", "timm"))


def _total(found: Iterable[Finished]) -> float:
    return sum(one.seconds or 0.0 for one in found)


def _comment(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise HVTError(f"cannot read the comment {path}: {error}") from error


def _figures_part(protocol: Protocol, known: Known, folder: str) -> list[str]:
    parts = [
        "Figure 1: cost against top-1, the paper's main table and ours.",
        f"![Multiply-adds against top-1: the paper's points and ours]({folder}/figure1.png)",
        "Figure 4: training loss (dashed) and top-1 (solid) of DeiT-Ti and the scaled HVT-Ti-4, "
        "whose costs are nearly equal, at equal epochs"
        + (", longer than the tables' rows." if protocol.name in CURVE_EPOCHS else "."),
    ]
    if curves(protocol, known):
        picture = f"{folder}/figure4.png"
        parts.append(f"![Loss and top-1 by epoch of DeiT-Ti and Scale HVT-Ti-4]({picture})")
    else:
        parts.append("Not run yet.")
    return parts


def curves(protocol: Protocol, known: Known) -> dict[str, list[dict[str, object]]]:
    """Figure 4's two curves, of the first seed that both have; empty without."""
    pair = {
        line.row.name: {one.seed: one.curve for one in line.found["epochs"]}
        for line in fill(protocol, get_table(FIGURE4), known).lines
    }
    shared = sorted(set.intersection(*(set(seeds) for seeds in pair.values())))
    return {name: seeds[shared[0]] for name, seeds in pair.items()} if shared else {}


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 99) -> str:
    """A table; the columns from `left` on are aligned to the right."""
    rule = ["---" if index < left else "--:" for index in range(len(headings))]
    every = [headings, rule, *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in every)
