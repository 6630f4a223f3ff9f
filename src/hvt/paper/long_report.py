"""The page's part on the `long` protocol: rows, gaps by length, claims by regime, predictions."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Iterable, Mapping

from ..config import HVTConfig
from ..costs import cost
from .claims import BUDGETS, CLAIMS, Claim, Comparison, Verdict, describe, judge
from .filled import NOT_RUN, READINGS, markdown
from .long import PARTS
from .long_results import FLAT, LENGTHS, Gap, LongResults, Measured
from .predictions import AGAINST, PREDICTIONS, SEEN, WORDS, Prediction
from .protocol import SOURCES, macs_of
from .tables import get_row, get_table

REGIMES = {"A": "capacity-limited", "B": "in between", "C": "data-limited"}
"""What limits a training, by group: few parameters and many images, or the reverse."""


@dataclasses.dataclass(frozen=True)
class RegimeClaim:
    """A claim in a regime."""

    number: str
    group: str
    comparisons: tuple[Comparison, ...] = ()
    """In place of the claim's own, where its rows have not been trained there."""
    words: str = ""
    """In place of the claim's own, where a part of it is not tested there."""
    part: str = ""
    """What of it is, in short."""

    @property
    def claim(self) -> Claim:
        (claim,) = (one for one in CLAIMS if one.number == self.number)
        return dataclasses.replace(
            claim,
            comparisons=self.comparisons or claim.comparisons,
            words=self.words or claim.words,
        )

    @property
    def data(self) -> str:
        """The paper's data set whose figures belong beside ours."""
        of_table = "imagenet" if self.claim.table == "main" else "cifar100"
        return self.claim.data or ("imagenet" if self.group == "A" else of_table)


_HALF = "HVT-1, at half of DeiT's cost, stays within 3 points of it at equal epochs."

TESTS = (
    RegimeClaim("1", "A"),
    RegimeClaim("2a", "A", words=f"In the tiny setting {_HALF}"),
    RegimeClaim("2b", "B", words=f"In the small setting {_HALF}"),
    RegimeClaim("3", "A"),
    RegimeClaim("5a", "B"),
    RegimeClaim(
        "5a",
        "C",
        tuple(Comparison(f"M={stages}", "M=0") for stages in (2, 4)),
        "Pooling stages do not hurt on CIFAR-100: two and four of them are not below none.",
        "for two and four stages",
    ),
    RegimeClaim(
        "5b",
        "A",
        (Comparison("HVT-Ti-0", "HVT-Ti-1", strict=True),),
        "Pooling stages hurt on ImageNet: one of them is below none.",
        "for one stage",
    ),
    RegimeClaim("5b", "B"),
    RegimeClaim("8a", "A"),
)
"""The claims that the parts of `long` can tell of; the others are not tested there."""


def verdict(test: RegimeClaim, results: LongResults) -> Verdict:
    """What was measured of a claim in a regime."""
    judged = judge(
        test.claim, "epochs", results.top1(test.group), results.spread(test.group), _printed(test)
    )
    assert judged is not None  # every claim is made at equal epochs
    return judged


def _printed(test: RegimeClaim) -> dict[str, float]:
    """The paper's figures by the names that claims use."""
    elsewhere = {"HVT-Ti-0": ("cls_token", "DeiT-Ti without CLS"), "HVT-Ti-1": ("main", "HVT-Ti-1")}
    printed = {}
    for name in {name for one in test.claim.comparisons for name in (one.left, one.right)}:
        table, own = elsewhere.get(name, (test.claim.table, name))
        row = get_row(get_table(table), own)
        if test.data in row.top1:
            printed[name] = row.top1[test.data]
    return printed


# ── one line for each claim ─────────────────────────────────────────────────────────────────────


def summary(
    results: LongResults, short: Mapping[str, Mapping[str, Verdict]], training: str
) -> list[str]:
    """Every claim with its verdict in every regime; `short` has those of another training."""
    passes = [f"{training}, {READINGS['epochs']}", READINGS["compute"]]
    headings = ["", "claim", *passes, *(f"long, {words}" for words in REGIMES.values())]
    rows = []
    for claim in sorted(CLAIMS, key=lambda claim: claim.number):
        cells = [claim.number, claim.words]
        passes_of = short[claim.number]
        cells += [_brief(passes_of[b]) if b in passes_of else "–" for b in BUDGETS]
        tests = {one.group: one for one in TESTS if one.number == claim.number}
        for group in REGIMES:
            test = tests.get(group)
            cells.append("–" if test is None else _brief(verdict(test, results), test.part))
        rows.append(cells)
    return [
        markdown(headings, rows),
        "In brackets our difference in points, where the claim is about one, and the paper's where "
        "it has one for that reading. A dash: not tested there, or the same trainings as at equal "
        "epochs. *Equal compute* is DeiT-Ti's of the training before it, in which dearer models "
        "see fewer images and cheaper ones more. *Long* is at equal epochs alone, and of claims "
        "2a and 2b tests that half. *Long, "
        f"capacity-limited* is {_regime(results, 'A')}, as ImageNet is for the paper's models; "
        f"*in between* is {_regime(results, 'B')}; *data-limited* is {_regime(results, 'C')}, as "
        "CIFAR-100 is for the paper's.",
    ]


def _brief(verdict: Verdict, part: str = "") -> str:
    word = f"{verdict.word} {part}".rstrip()
    if len(verdict.outcomes) != 1 or verdict.missing:
        return word
    (one,) = verdict.outcomes
    paper = "" if one.paper is None else f"; paper {one.paper:+.2f}"
    return f"{word} ({one.difference:+.2f}{paper})"


def _regime(results: LongResults, name: str) -> str:
    """The size of a part's first model, its images and its epochs."""
    first = next(one for one in results.rows if one.part.name == name)
    data = first.training.recipe.data
    assert data is not None
    images = round(SOURCES[data][1] * first.part.train_fraction)
    size = f"{cost(first.training.config).params_m:.1f} M parameters"
    return f"{first.part.epochs} epochs of {images:,} images with {size}"


# ── the section ─────────────────────────────────────────────────────────────────────────────────


def section(results: LongResults, folder: str) -> list[str]:
    """The whole of it, as parts of the page."""
    done = sum(r.seed in one.part.seeds for one in results.rows for r in one.results)
    wanted = sum(len(one.part.seeds) for one in results.rows)
    return [
        "## long",
        "One pass shows how fast a model learns; the protocol `long` trains the same models on the "
        f"same images for {_lengths()}, by [long.toml](../src/hvt/paper/long.toml), to come "
        "closer to what they can hold. Of each part's question and of what was expected before the "
        f"first row ran, [predictions.md]({folder}/predictions.md) tells. Of {wanted} trainings, "
        f"{done} have been run.",
        "```\nhvt paper run long --root DATA\nhvt paper report\n```",
        "### long: rows",
        _rows_table(results.rows),
        "Training loss: the last epoch's, with label smoothing. Second half: points gained from "
        "half of the epochs to the end, in which the learning rate falls to zero. Flat: less than "
        f"{FLAT:g}, a measure meant for 20 to 40 epochs, as in part A." + _provenance(results.rows),
        "### long: gap to DeiT-Ti",
        _gaps_table(results),
        "± is the standard error, by the spread over seeds that is named below and by the rows' "
        "numbers of seeds. One and three epochs are the CPU protocol's, with its learning rate "
        "(`hvt paper run main cls_token figure4`); each length has a schedule of its own, so that "
        "no point lies on the way to the next.",
        f"![Points above DeiT-Ti against epochs: {', '.join(GAPS)}]({folder}/gap.png)",
        "Bars are one standard error.",
        "### long: claims",
        _noise(results),
        *(_paragraph(test, results) for test in TESTS),
        _untested(),
        "### long: predictions",
        _predictions_table("prediction", PREDICTIONS, results, WORDS),
        "*Not decided* is a figure that two standard errors could carry over the limit. That rule "
        "was made when the first results were known, so the last column has the outcome without "
        "it, that of the bare figures.",
        "The predictions also say what would speak against the explanation:",
        _predictions_table("against it", AGAINST, results, SEEN),
    ]


def _lengths() -> str:
    epochs = [part.epochs for part in PARTS.values()]
    return f"{min(epochs)} to {max(epochs)} epochs"


def _rows_table(rows: Iterable[Measured]) -> str:
    headings = ["part", "row", "M multiply-adds", "params (M)", "epochs", "top-1 by seed"]
    headings += ["mean ± spread", "training loss", "second half", "flat"]
    lines = []
    for one in rows:
        config = one.training.config
        macs = one.training.macs
        if one.results:
            config = HVTConfig.from_dict(one.results[0].config)
            macs = macs_of(config)
        cells = [one.part.name, one.name, f"{macs / 1e6:.1f}", f"{cost(config).params_m:.3f}"]
        cells += [f"{one.training.epochs:g}", *_top1(one), _loss(one)]
        cells += ["", ""] if one.gain is None else [f"{one.gain:+.2f}", _yes(one.gain < FLAT)]
        lines.append(cells)
    return markdown(headings, lines, left=2)


def _top1(one: Measured) -> list[str]:
    """By seed, and the mean with the standard deviation."""
    figures = {result.seed: result.top1 for result in one.results}
    if not figures:
        return [NOT_RUN, NOT_RUN]
    missing = [seed for seed in one.part.seeds if seed not in figures]
    by_seed = [f"{figures[seed]:.2f}" for seed in sorted(figures)]
    by_seed += [f"seed {seed} {NOT_RUN}" for seed in missing]
    mean = f"{statistics.fmean(figures.values()):.2f}"
    if len(figures) > 1:
        mean += f" ± {statistics.stdev(figures.values()):.2f}"
    return [", ".join(by_seed), mean]


def _loss(one: Measured) -> str:
    """The last epoch's, with label smoothing, on average over seeds."""
    losses = [result.curve[-1]["train_loss"] for result in one.results]
    return f"{statistics.fmean(losses):.2f}" if losses else ""


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _provenance(rows: Iterable[Measured]) -> str:
    """By which commands, on what."""
    results = [result for one in rows for result in one.results]
    if not results:
        return ""
    versions = sorted({result.versions["torch"] for result in results})
    machines = sorted({result.place for result in results})
    first = shlex.join(shlex.split(results[0].command))
    return (
        f" Each by a command such as `{first}`; torch {', '.join(versions)}; {'; '.join(machines)}."
    )


GAPS = ("HVT-Ti-0", "HVT-Ti-1", "Scale HVT-Ti-4")
"""Rows whose distance to DeiT-Ti is followed over the lengths."""


def gaps(results: LongResults, name: str) -> dict[int, Gap]:
    """A row's gap to DeiT-Ti by epochs, where both have been run."""
    measured = {epochs: results.gap(group, name, "DeiT-Ti") for group, epochs in LENGTHS.items()}
    return {epochs: gap for epochs, gap in measured.items() if gap is not None}


def _gaps_table(results: LongResults) -> str:
    headings = ["epochs", *(str(epochs) for epochs in LENGTHS.values())]
    rows = []
    for name in GAPS:
        rows.append([f"{name} − DeiT-Ti", *(_gap(results, group, name) for group in LENGTHS)])
    return markdown(headings, rows, left=1)


def _gap(results: LongResults, group: str, name: str) -> str:
    gap = results.gap(group, name, "DeiT-Ti")
    if gap is None:
        return NOT_RUN
    return f"{gap.points:+.2f}" + ("" if gap.error is None else f" ± {gap.error:.2f}")


def _noise(results: LongResults) -> str:
    plain, power = (results.noise[kind] for kind in (False, True))
    if plain is None:
        return "No row has several seeds, so nothing is known of their spread."
    more = ""
    if power is not None:
        more = f", those of rows with PoWER by {power:.2f} ({_several(results, True)})"
    return (
        f"Seeds differ by {plain:.2f} points ({_several(results, False)}){more}: standard "
        "deviations, pooled over the trainings that have several seeds. Rows with one are judged "
        "by the same spread."
    )


def _several(results: LongResults, power: bool) -> str:
    short, long = results.several[power]
    return f"{short} trainings of the CPU protocol, {long} of `long`"


def _paragraph(test: RegimeClaim, results: LongResults) -> str:
    judged = verdict(test, results)
    where = f"{REGIMES[test.group].capitalize()} (part {_parts(test)})"
    sentences = [f"**Claim {test.number}.** {test.claim.words}"]
    if judged.word == NOT_RUN:
        sentences.append(f"{where}: not run yet ({', '.join(judged.missing)}).")
    else:
        verb = "is not decided" if judged.word == "not decided" else judged.word
        rest = f"; not run: {', '.join(judged.missing)}" if judged.missing else ""
        sentences.append(f"{where}: it **{verb}**{rest}.")
    return " ".join([*sentences, *(describe(outcome) for outcome in judged.outcomes)])


def _parts(test: RegimeClaim) -> str:
    return "A and P" if test.number == "8a" else test.group


def _untested() -> str:
    tested = {test.number for test in TESTS}
    others = sorted(claim.number for claim in CLAIMS if claim.number not in tested)
    return f"Not tested by the protocol `long`: claims {', '.join(others)}."


def _predictions_table(
    kind: str,
    predictions: Iterable[Prediction],
    results: LongResults,
    words: Mapping[bool | None, str],
) -> str:
    rows = []
    order = list(PARTS)
    exact = dataclasses.replace(results, noise={True: 0.0, False: 0.0})
    for one in sorted(predictions, key=lambda one: order.index(one.part)):
        measured, outcome = one.outcome(results, words)
        rows.append([one.part, one.words, measured, outcome, one.outcome(exact, words)[1]])
    return markdown(["part", kind, "measured", "outcome", "by the bare figures"], rows)
