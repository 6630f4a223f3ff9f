"""`docs/reproduction.md`: every table and claim of the paper with what was measured here.

The text follows from the result files alone, so that a test can tell whether it is current.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import HVTError
from ..training.recipe import Recipe
from ..training.watch import clock
from .claims import BUDGETS, CLAIMS, Claim, Verdict, describe, judge
from .filled import (
    NAMES,
    NOT_RUN,
    READINGS,
    SHORT,
    SLOW,
    Filled,
    Known,
    Noise,
    cells,
    fill,
    is_short,
    is_slow,
    markdown,
    noise_of,
    several_seeds,
    usual_speed,
)
from .long_report import section, summary
from .long_results import LongResults, collect
from .protocol import CURVE_EPOCHS, SEEDS, Protocol, note
from .results import Finished
from .tables import CURVES, FIGURE4, get_table, tables

# ── claims ──────────────────────────────────────────────────────────────────────────────────────


def verdicts(claim: Claim, filled: Filled, noise: Noise) -> dict[str, Verdict]:
    """What was measured of a claim in each reading that it is made for."""
    spread = filled.spread(noise)
    tested = claim.tested(filled.protocol, filled.data)
    by_budget = {}
    for budget in BUDGETS:
        figures = filled.figures(budget) if tested else {}
        # The paper trains all rows for as many epochs, so it has figures for that reading alone.
        printed = _printed(filled, claim.data) if budget == "epochs" else {}
        macs = {line.row.name: line.macs for line in filled.lines}
        verdict = judge(claim, budget, figures, spread, printed, filled.short(budget), macs)
        if verdict is not None:
            by_budget[budget] = verdict if tested else Verdict((), tested=False)
    return by_budget


def _paragraph(claim: Claim, filled: Filled, noise: Noise) -> str:
    by_budget = verdicts(claim, filled, noise)
    sentences = [f"**Claim {claim.number}.** {claim.words}"]
    for budget in [b for b in by_budget if b in filled.readings] or list(by_budget):
        verdict = by_budget[budget]
        how = f"At {READINGS[budget]}"
        if not verdict.tested:
            sentences.append(f"Not tested by the protocol `{filled.protocol}`.")
        elif verdict.word == NOT_RUN:
            sentences.append(f"{how}: not run yet ({', '.join(verdict.missing)}).")
        else:
            rest = f"; not run: {', '.join(verdict.missing)}" if verdict.missing else ""
            verb = "is not decided" if verdict.word == "not decided" else verdict.word
            sentences.append(f"{how} it **{verb}**{rest}.")
        sentences += [describe(outcome) for outcome in verdict.outcomes]
    return " ".join(sentences)


def _printed(filled: Filled, data: str | None = None) -> dict[str, float]:
    """The paper's figures to compare with: of the same data where it has them."""
    sources = [data] if data else [filled.data, "cifar100", "imagenet"]
    for source in sources:
        rows = [line.row for line in filled.lines]
        figures = {row.name: row.top1[source] for row in rows if source in row.top1}
        if len(figures) == len(rows):
            return figures
    return {}


# ── the page ────────────────────────────────────────────────────────────────────────────────────


def long_results(
    protocol: Protocol, known: Known, long: Protocol, known_long: Known
) -> LongResults:
    """What the page says of the long protocol, beside one of tables."""
    filled = [fill(protocol, table, known) for table in tables().values() if table.trained]
    return collect(long, known_long, protocol, known, several_seeds(filled))


def render(
    protocol: Protocol,
    known: Known,
    comments: Path,
    data: str | None = None,
    long: LongResults | None = None,
) -> str:
    """The page, from the results and from `TABLE.md` in the folder of comments, if there is one."""
    filled = [fill(protocol, table, known, data) for table in tables().values() if table.trained]
    used = {one.name: one for table in filled for one in table.results}
    # One spread for the page, so that a difference has one standard error wherever it stands; but a
    # recipe in place of the protocol's has its own.
    beside = long is not None and long.short == protocol
    noise = long.noise if long is not None and beside else noise_of(filled)
    usual = usual_speed(used.values())
    parts = [
        "# Reproduction",
        "<!-- Written by `hvt paper report` from the result files; do not edit. -->",
        _opening(protocol, filled, list(used.values()), noise, beside, data),
        *_summary(filled, noise, long, "one pass" if beside else "the recipe above"),
        "## Claims",
        _claims_table(filled, noise),
        "## Tables",
    ]
    for one in filled:
        parts += _table_part(protocol, one, noise, usual, comments, data)
    parts += ["## Figures", *_figures_part(protocol, known, data, comments.name)]
    if long is not None:
        parts += section(long, comments.name)
        comment = _comment(comments / "long.md")
        parts += ["### long: what it says", comment] if comment else []
    return "\n\n".join(parts) + "\n"


def _summary(
    filled: Sequence[Filled], noise: Noise, long: LongResults | None, training: str
) -> list[str]:
    if long is None:
        return []
    by_name = {one.table.name: one for one in filled}
    short = {}
    for claim in CLAIMS:
        one = by_name[claim.table]
        judged = verdicts(claim, one, noise)
        short[claim.number] = {b: v for b, v in judged.items() if b in one.readings}
    return ["## Verdicts", *summary(long, short, training)]


def _opening(
    protocol: Protocol,
    filled: Sequence[Filled],
    used: Sequence[Finished],
    noise: Noise,
    with_long: bool,
    data: str | None,
) -> str:
    wanted = {
        f"{line.plans[budget].training.key}-{seed}"
        for one in filled
        for line in one.lines
        for budget in BUDGETS
        for seed in SEEDS.get(line.row.table, (0,))
    }
    done = {f"{one.key}-{one.seed}" for one in used} & wanted
    lines = [
        "The paper's tables, with its figures and ours beside them. Every row is trained from "
        "scratch, alike but for the model, under two budgets: *equal epochs*, as the paper trains, "
        "and *equal compute*, where every row gets about the same multiply-adds of training and a "
        "cheap model sees more images. Top-1 is that of the last weights on the test images in "
        "per cent, with the standard deviation over seeds; no epoch was chosen by it. In the paper "
        "it is that of 300 epochs at 224 pixels, so differences are to be compared, not levels.",
        f"Of {len(wanted)} trainings, {len(done)} have been run"
        + (f", in {_total(used)}." if used else "."),
    ]
    if noise[False] is not None:
        power = "" if noise[True] is None else f", those of rows with PoWER by {noise[True]:.2f}"
        both = ", those of [long](#long) too" if with_long else ""
        lines.append(
            f"Seeds differ by {noise[False]:.2f} points{power} (standard deviation, pooled over "
            f"all such rows with several seeds{both}); from it follow the standard errors below, "
            "also of rows with one seed. A claim holds *not clearly*, or is *not decided*, where "
            "two standard errors could have turned it round. It holds *the other way round* where "
            "the claim allows for a loss and the paper has one, but here it is a gain, or the "
            "reverse; its *sign is not clear* where that gain is within two standard errors. These "
            "are of the seeds alone, for the same test images; other 10,000 images would move "
            "each top-1 by half a point. At equal compute a row with less than half an epoch "
            f"({SHORT}) decides nothing."
        )
    flags = shlex.join(protocol.flags(data))
    commands = f"```\nhvt paper run all {flags} --root DATA\nhvt paper report {flags}\n```"
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
    fields = ", ".join(f"{k} {_value(v)}" for k, v in values.items())
    return (
        f"Protocol `{protocol.name}` on {NAMES[data]}: {fields}; the rest is DeiT's recipe. "
        f"Models: {model}; the compute budget is what `{recipe.model}` takes in "
        f"{recipe.epochs:g} epoch{'' if recipe.epochs == 1 else 's'}."
    )


def _value(value: object) -> str:
    return "off" if value in ("", 0, 0.0, False) else str(value)


def _claims_table(filled: Sequence[Filled], noise: Noise) -> str:
    by_name = {one.table.name: one for one in filled}
    headings = ["", "claim", "table", "difference in points", "paper's", "ours, equal epochs"]
    rows = []
    for claim in sorted(CLAIMS, key=lambda claim: claim.number):
        one = by_name[claim.table]
        by_budget = verdicts(claim, one, noise)
        link = f"[{claim.table}](#{claim.table})"
        words = [by_budget[budget].word if budget in by_budget else "" for budget in BUDGETS]
        rows.append([claim.number, claim.words, link, *_differences(claim, one, by_budget), *words])
    return markdown([*headings, *(READINGS[budget] for budget in BUDGETS)], rows)


def _differences(claim: Claim, filled: Filled, by_budget: Mapping[str, Verdict]) -> list[str]:
    """Three cells, a line for each comparison at equal epochs: what, the paper's and ours."""
    printed = _printed(filled, claim.data)
    ours = {}
    if "epochs" in by_budget:
        ours = {one.comparison: one.difference for one in by_budget["epochs"].outcomes}
    lines = []
    for one in claim.comparisons:
        if "epochs" in one.budgets:
            mine = f"{ours[one]:+.2f}" if one in ours else ""
            paper = f"{printed[one.left] - printed[one.right]:+.2f}" if printed else ""
            lines.append((f"{one.left} − {one.right}", paper, mine))
    return ["<br>".join(column) if any(column) else "" for column in zip(*lines, strict=True)]


def _table_part(
    protocol: Protocol,
    one: Filled,
    noise: Noise,
    usual: float | None,
    comments: Path,
    data: str | None,
) -> list[str]:
    table = one.table
    headings, rows = cells(one, usual)
    parts = [f"### {table.name}", f"{table.place} of the paper: {table.about}."]
    parts.append(markdown(headings, rows, left=1))
    if one.readings == ("epochs",):
        parts.append("Both readings train every row of this table alike, so there is one.")
    notes = _notes(one, usual)
    if notes:
        parts.append("\n".join(f"- {text}" for text in notes))
    parts.append(_provenance(protocol, one, data))
    parts += [_paragraph(claim, one, noise) for claim in CLAIMS if claim.table == table.name]
    comment = _comment(comments / f"{table.name}.md")
    return parts + ([comment] if comment else [])


def _notes(one: Filled, usual: float | None) -> list[str]:
    """What must be known of single rows."""
    notes = [note(line.row, line.plans["epochs"].training.config) for line in one.lines]
    lines = [text for text in notes if text]
    guests = [line.row for line in one.lines if line.row.table != one.table.name]
    if guests:
        places = ", ".join(f"{row.name} in [{row.table}](#{row.table})" for row in guests)
        lines.append(f"Not in the paper's table: {places}; DeiT without its class token.")
    if any(line.row.power for line in one.lines):
        lines.append(
            "DeiT with PoWER: epochs of DeiT, of the search and of the training after it; at equal "
            "epochs that is more than the other rows have, as in the paper. Its tokens are those "
            "that the search of the first seed leaves at equal epochs."
        )
    if any(line.results["compute"] and is_short(line.plans["compute"]) for line in one.lines):
        lines.append(f"{SHORT} Less than half an epoch: shown, and decides nothing.")
    if any(is_slow(result, usual) for result in one.results):
        lines.append(
            f"{SLOW} At less than half of the usual speed, the median of multiply-adds a second: "
            "the training was paused or the machine had other work, and the time says little of "
            "the model."
        )
    return lines


def _provenance(protocol: Protocol, one: Filled, data: str | None) -> str:
    command = f"`{shlex.join(['hvt', 'paper', 'run', one.table.name, *protocol.flags(data)])}`"
    results = one.results
    if not results:
        return f"Command: {command}."
    seeds = sorted({result.seed for result in results})
    machines = sorted({result.place for result in results})
    stacks = sorted({_stack(result) for result in results})
    return (
        f"Command: {command}; seeds {', '.join(map(str, seeds))}; {len(results)} trainings, "
        f"{_total(results)}; {'; '.join(stacks)}; {'; '.join(machines)}."
    )


def _stack(result: Finished) -> str:
    return ", ".join(f"{name} {result.versions[name]}" for name in ("hvt", "torch", "timm"))


def _total(results: Collection[Finished]) -> str:
    """The time of all. PoWER's has that of the DeiT that it starts from, which may be there too."""
    plain = {_identity(one): one.seconds or 0.0 for one in results if not one.power}
    seconds = sum(plain.values())
    seconds += sum(
        (one.seconds or 0.0) - plain.get(_identity(one), 0.0) for one in results if one.power
    )
    least = "at least " if any(one.seconds is None for one in results) else ""
    return f"{least}{clock(max(0.0, seconds))} in all"


def _identity(one: Finished) -> str:
    """The recipe, in which a field that is as by default may be missing in older results."""
    plain = vars(Recipe())
    return json.dumps({k: v for k, v in sorted(one.recipe.items()) if v != plain.get(k)})


def _comment(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise HVTError(f"cannot read the comment {path}: {error}") from error


def _figures_part(protocol: Protocol, known: Known, data: str | None, folder: str) -> list[str]:
    parts = [
        "Figure 1: cost against top-1, the paper's main table and ours; hollow where a row has "
        "less than half an epoch.",
        f"![Multiply-adds against top-1: the paper's points and ours]({folder}/figure1.png)",
        "Figure 4: training loss (dashed) and top-1 (solid) of DeiT-Ti and the scaled HVT-Ti-4, "
        "whose costs are nearly equal, at equal epochs"
        + (", longer than the tables' rows." if protocol.name in CURVE_EPOCHS else "."),
    ]
    if curves(protocol, known, data):
        image = f"{folder}/figure4.png"
        parts.append(f"![Loss and top-1 by epoch of DeiT-Ti and Scale HVT-Ti-4]({image})")
    else:
        parts.append("Not run yet.")
    return parts


def curves(
    protocol: Protocol, known: Known, data: str | None = None
) -> dict[str, list[dict[str, object]]]:
    """Figure 4's two curves, of the first seed that both have; empty without."""
    pair = {
        line.row.name: {one.seed: one.curve for one in line.results["epochs"]}
        for line in fill(protocol, get_table(FIGURE4), known, data).lines
        if line.row.name in CURVES
    }
    shared = sorted(set.intersection(*(set(seeds) for seeds in pair.values())))
    return {name: seeds[shared[0]] for name, seeds in pair.items()} if shared else {}
