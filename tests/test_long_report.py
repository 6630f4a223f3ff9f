"""The page's part on the long protocol, from result files as `hvt paper run` writes them."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from PIL import Image

from hvt.cli import main
from hvt.paper import long, results
from hvt.paper.claims import CLAIMS
from hvt.paper.long_report import TESTS, section, summary, verdict
from hvt.paper.long_results import LongResults
from hvt.paper.predictions import AGAINST, PREDICTIONS, SEEN
from hvt.paper.protocol import FILES, Protocol, Training, load_protocol, plan
from hvt.paper.report import long_results
from hvt.paper.results import Finished
from hvt.paper.tables import FIGURE4, get_row, get_table, trainable

Captured = pytest.CaptureFixture[str]
Figures = Mapping[str, Sequence[float]]

TINY = ("DeiT-Ti", "DeiT-Ti without CLS", "HVT-Ti-1", "Scale HVT-Ti-4")


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("long")


@pytest.fixture(scope="module")
def cpu() -> Protocol:
    return load_protocol("cpu")


def finished(
    training: Training, seed: int, top1: float, protocol: str, gain: float = 3.0, loss: float = 0.9
) -> Finished:
    """A result whose curve gains so many points in its second half."""
    epochs = int(training.recipe.epochs)
    points = (max(1, epochs // 2), top1 - gain), (epochs, top1)
    recipe = {k: v for k, v in training.recipe.to_dict().items() if v is not None}
    return Finished(
        key=training.key,
        seed=seed,
        protocol=protocol,
        data="cifar100",
        command=f"hvt paper run {protocol} --seeds {seed}",
        epochs=training.epochs,
        training_macs=training.training_macs,
        top1=top1,
        top5=top1 + 20,
        loss=2.0,
        seconds=60.0,
        images_per_second=100.0,
        config=training.config.to_dict(),
        recipe=recipe | {"seed": seed},
        curve=[{"epoch": e, "train_loss": loss, "val_top1": value} for e, value in points],
        machine={"cpu": "a CPU", "cores": 2, "threads": 1, "processes": 1, "gpu": None},
        versions=results.versions(),
        date="2026-01-01",
    )


def write_long(
    folder: Path,
    protocol: Protocol,
    part: str,
    top1: Figures,
    gain: float = 3.0,
    losses: Mapping[str, float] | None = None,
) -> None:
    for row in long.rows_of(long.PARTS[part]):
        training = long.training(protocol, long.PARTS[part], row)
        for seed, figure in enumerate(top1.get(row.name, ())):
            loss = (losses or {}).get(row.name, 0.9)
            one = finished(training, seed, figure, "long", gain, loss)
            results.write(folder / "long", one)


def write_short(folder: Path, cpu: Protocol, top1: Figures, table: str | None = None) -> None:
    for home, name in (*long.TINY, *long.SMALL):
        if name in top1:
            source = trainable()[table] if table else get_table(home)
            training = plan(cpu, get_row(source, name), "epochs", "cifar100").training
            for seed, figure in enumerate(top1[name]):
                results.write(folder / "cpu", finished(training, seed, figure, "cpu"))


def collected(folder: Path, cpu: Protocol, protocol: Protocol) -> LongResults:
    known = results.read_all([folder / "cpu"])
    return long_results(cpu, known, protocol, results.read_all([folder / "long"]))


def outcomes(found: LongResults) -> dict[str, str]:
    return {one.words: one.outcome(found)[1] for one in PREDICTIONS}


def words(found: LongResults) -> dict[tuple[str, str], str]:
    return {(test.number, test.group): verdict(test, found).word for test in TESTS}


# What the paper's explanation predicts, in figures.
PAPER_A = {
    "DeiT-Ti": [54.0, 54.2], "DeiT-Ti without CLS": [54.5, 54.7], "HVT-Ti-1": [52.0, 52.2],
    "Scale HVT-Ti-4": [60.0, 60.2],
}  # fmt: skip
PAPER_A10 = {
    "DeiT-Ti": [50.0], "DeiT-Ti without CLS": [51.0], "HVT-Ti-1": [49.6], "Scale HVT-Ti-4": [57.0],
}  # fmt: skip
ONE_PASS = {
    "DeiT-Ti": [20.9, 21.1], "DeiT-Ti without CLS": [21.9], "HVT-Ti-1": [23.7, 23.9],
    "Scale HVT-Ti-4": [31.0, 31.2], "DeiT-S": [23.7], "M=0": [26.2], "M=1": [27.9], "M=2": [29.8],
    "M=3": [30.1], "M=4": [31.0],
}  # fmt: skip
PAPER_B = {
    "DeiT-S": [60.0], "M=0": [60.5], "M=1": [60.0], "M=2": [59.0], "M=3": [58.0], "M=4": [57.0]
}  # fmt: skip
PAPER_C = {"M=0": [30.0], "M=2": [32.0], "M=4": [33.0]}


@pytest.fixture(scope="module")
def as_predicted(
    tmp_path_factory: pytest.TempPathFactory, cpu: Protocol, protocol: Protocol
) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_short(folder, cpu, ONE_PASS)
    write_short(folder, cpu, {"DeiT-Ti": [30.0], "Scale HVT-Ti-4": [39.0]}, FIGURE4)
    write_long(folder, protocol, "A", PAPER_A)
    write_long(folder, protocol, "A10", PAPER_A10)
    write_long(folder, protocol, "B", PAPER_B)
    write_long(folder, protocol, "C", PAPER_C, losses={"M=0": 0.79, "M=2": 0.8, "M=4": 0.82})
    write_long(folder, protocol, "P", {"DeiT-Ti + PoWER": [52.4, 51.6]})
    return folder


def test_predictions_that_come_true(as_predicted: Path, cpu: Protocol, protocol: Protocol) -> None:
    result = collected(as_predicted, cpu, protocol)
    reported = outcomes(result)
    assert reported.pop("M=0 fits them best.") == "not decided"  # losses have no known spread
    assert set(reported.values()) == {"came true"}, reported


@pytest.mark.parametrize(
    ("part", "changed", "failing"),
    [
        ("A", {"HVT-Ti-1": [54.5, 54.7]}, ["HVT-Ti-1 is below", "It is so by", "HVT-Ti-1's gap",
                                           "HVT-Ti-1 and DeiT-Ti with"]),
        ("A", {"HVT-Ti-1": [50.0, 50.2]}, ["It is so by", "HVT-Ti-1 and DeiT-Ti with",
                                           "A training of 40"]),
        ("A", {"Scale HVT-Ti-4": [56.0, 56.2]}, ["The scaled HVT-Ti-4", "The scaled HVT's lead",
                                                 "A training of 40"]),
        ("A", {"DeiT-Ti without CLS": [53.5, 53.7]}, ["The average of all tokens"]),
        ("A10", {"HVT-Ti-1": [47.0]}, ["HVT-Ti-1's gap", "It is about 0"]),
        ("B", {"M=1": [58.9]}, ["M=1 is within"]),
        ("B", {"M=4": [55.0]}, ["The stages fall off"]),
        ("B", {"M=0": [63.5]}, ["M=1 is within", "The stages fall off", "Every gap to DeiT-S"]),
        ("C", {"M=4": [29.0]}, ["Two and four stages", "Four stages are above"]),
        ("P", {"DeiT-Ti + PoWER": [54.0, 54.0]}, ["HVT-Ti-1 and DeiT-Ti with"]),
    ],
)  # fmt: skip
def test_predictions_that_do_not(
    as_predicted: Path,
    tmp_path: Path,
    cpu: Protocol,
    protocol: Protocol,
    part: str,
    changed: Figures,
    failing: list[str],
) -> None:
    shutil.copytree(as_predicted, tmp_path, dirs_exist_ok=True)
    write_long(tmp_path, protocol, part, changed)
    result = collected(tmp_path, cpu, protocol)
    reported = [text for text, outcome in outcomes(result).items() if outcome == "did not"]
    assert len(reported) == len(failing), reported
    for begins in failing:
        assert any(text.startswith(begins) for text in reported), begins


@pytest.mark.parametrize(
    ("part", "changed", "undecided"),
    [
        ("A", {"HVT-Ti-1": [53.8, 54.0]}, ["HVT-Ti-1 is below"]),  # by 0.2, two errors are 0.28
        ("A", {"HVT-Ti-1": [52.8, 53.0]}, ["It is so by", "HVT-Ti-1 and DeiT-Ti with"]),
        ("A", {"Scale HVT-Ti-4": [57.0, 57.2]}, ["The scaled HVT-Ti-4", "The scaled HVT's lead"]),
        ("A10", {"HVT-Ti-1": [49.1]}, ["It is about 0"]),
        ("A10", {"HVT-Ti-1": [48.1]}, ["HVT-Ti-1's gap"]),  # -1.9 after 10 epochs, -2.0 after 40
        ("B", {"M=4": [56.1]}, ["The stages fall off"]),
        ("C", {"M=2": [29.9]}, ["Two and four stages"]),
    ],
)
def test_predictions_that_two_standard_errors_could_turn_round(
    as_predicted: Path,
    tmp_path: Path,
    cpu: Protocol,
    protocol: Protocol,
    part: str,
    changed: Figures,
    undecided: list[str],
) -> None:
    shutil.copytree(as_predicted, tmp_path, dirs_exist_ok=True)
    write_long(tmp_path, protocol, part, changed)
    reported = outcomes(collected(tmp_path, cpu, protocol))
    for begins in undecided:
        (outcome,) = [word for text, word in reported.items() if text.startswith(begins)]
        assert outcome == "not decided", begins


def test_what_would_speak_against_the_explanation(
    as_predicted: Path, tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    result = collected(as_predicted, cpu, protocol)
    assert {one.outcome(result, SEEN)[1] for one in AGAINST} == {"not seen"}
    shutil.copytree(as_predicted, tmp_path, dirs_exist_ok=True)
    write_long(tmp_path, protocol, "A", {"HVT-Ti-1": [54.5, 54.7]})
    write_long(tmp_path, protocol, "B", {"M=4": [66.5]})
    write_long(tmp_path, protocol, "C", {"M=4": [29.0]})
    write_long(tmp_path, protocol, "P", {"DeiT-Ti + PoWER": [50.0, 50.2]})
    result = collected(tmp_path, cpu, protocol)
    assert [one.outcome(result, SEEN)[1] for one in AGAINST] == ["seen"] * 5
    empty = collected(tmp_path / "none", cpu, protocol)
    assert {one.outcome(empty, SEEN)[1] for one in AGAINST} == {"not run"}


def test_the_page_has_outcomes_by_the_bare_figures_too(
    as_predicted: Path, tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    shutil.copytree(as_predicted, tmp_path, dirs_exist_ok=True)
    write_long(tmp_path, protocol, "A", {"HVT-Ti-1": [53.8, 54.0]})  # by 0.2, two errors are 0.28
    page = "\n".join(section(collected(tmp_path, cpu, protocol), "reproduction"))
    lines = [line for line in page.splitlines() if line.startswith("| A | HVT-Ti-1 is ")]
    assert [line.split(" | ")[-2:] for line in lines] == [
        ["not decided", "came true |"],
        ["not decided", "not seen |"],
    ]


def test_predictions_say_how_many_seeds_there_are(
    tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    write_long(tmp_path, protocol, "A", {"DeiT-Ti": [54.0], "HVT-Ti-1": [52.0, 52.2]})
    result = collected(tmp_path, cpu, protocol)
    assert PREDICTIONS[0].outcome(result) == (
        "HVT-Ti-1 − DeiT-Ti: -1.90 ± 0.17 (n = 2 and 1)",
        "came true",
    )
    write_long(tmp_path / "one", protocol, "A", {"DeiT-Ti": [54.0], "HVT-Ti-1": [52.0]})
    unknown = collected(tmp_path / "one", cpu, protocol)  # what seeds would have changed
    assert PREDICTIONS[0].outcome(unknown)[1] == "not decided"


def test_curves_that_are_flat_and_images_that_are_not_learned(
    tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    write_long(tmp_path, protocol, "A", PAPER_A, gain=1.4)
    write_long(tmp_path, protocol, "C", PAPER_C, losses={"M=0": 0.8, "M=2": 0.79, "M=4": 0.99})
    result = collected(tmp_path, cpu, protocol)
    reported = outcomes(result)
    assert reported["No curve is flat."] == "did not"
    (fitted,) = [text for text in reported if text.startswith("All three fit")]
    assert reported[fitted] == "did not"
    page = "\n".join(section(result, "reproduction"))
    row = "| A | DeiT-Ti | 8.0 | 0.104 | 40 | 54.00, 54.20 | 54.10 ± 0.14 | 0.90 | +1.40 | yes |"
    assert row in page


def test_claims_by_regime(as_predicted: Path, cpu: Protocol, protocol: Protocol) -> None:
    result = collected(as_predicted, cpu, protocol)
    reported = words(result)
    assert reported[("1", "A")] == "holds"
    assert reported[("2a", "A")] == "holds"
    assert reported[("3", "A")] == "holds"
    assert reported[("5b", "A")] == reported[("5b", "B")] == "holds"
    assert reported[("5a", "B")] == "does not hold"
    assert reported[("5a", "C")] == "holds"
    assert reported[("8a", "A")] == "holds, not clearly"
    by_test = {(test.number, test.group): verdict(test, result).outcomes for test in TESTS}
    # The paper's differences: on ImageNet where capacity limits, on CIFAR-100 where images do.
    assert by_test[("3", "A")][0].paper == pytest.approx(72.42 - 72.20)
    assert by_test[("5b", "A")][0].paper == pytest.approx(72.42 - 69.64)
    assert by_test[("5a", "C")][1].paper == pytest.approx(75.43 - 71.99)
    assert by_test[("2b", "B")][0].paper == pytest.approx(78.00 - 79.80)
    # One seed in parts B and C: judged by the others' spread.
    error = by_test[("5b", "B")][0].error
    assert error == pytest.approx(2**0.5 * result.noise[False])


def test_two_seeds_of_one_row_do_not_displace_the_other_rows_spread(
    tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    write_short(tmp_path, cpu, {"DeiT-Ti": [20.0, 21.0], "HVT-Ti-1": [23.0, 24.0]})
    write_long(tmp_path, protocol, "A", {"DeiT-Ti": [54.0, 54.01], "HVT-Ti-1": [50.9]})
    result = collected(tmp_path, cpu, protocol)
    # Variances 0.5, 0.5 and 0.00005, with a degree of freedom each.
    assert result.noise[False] == pytest.approx((1.00005 / 3) ** 0.5)
    assert words(result)[("2a", "A")] == "not decided"  # a tenth of a point beyond the margin
    page = "\n".join(section(result, "x"))
    assert "differ by 0.58 points (2 trainings of the CPU protocol, 1 of `long`): standard" in page


def test_a_difference_has_one_standard_error(
    as_predicted: Path, cpu: Protocol, protocol: Protocol
) -> None:
    result = collected(as_predicted, cpu, protocol)
    (test,) = [one for one in TESTS if one.number == "2a"]
    (outcome,) = verdict(test, result).outcomes
    gap = result.gap("A", "HVT-Ti-1", "DeiT-Ti")
    assert gap is not None
    assert gap.error == pytest.approx(outcome.error)


def test_a_regime_s_claim_says_what_is_tested_there(
    as_predicted: Path, cpu: Protocol, protocol: Protocol
) -> None:
    page = "\n".join(section(collected(as_predicted, cpu, protocol), "x"))
    assert "stays within 3 points of it at equal epochs. Capacity-limited (part A)" in page
    assert "equal compute" not in page


def test_seeds_that_nobody_planned_are_not_counted(
    tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    write_long(tmp_path, protocol, "A10", {"DeiT-Ti": [50.0, 51.0, 52.0]})  # of which 0 is
    page = "\n".join(section(collected(tmp_path, cpu, protocol), "x"))
    assert "Of 23 trainings, 1 have been run." in page


def test_where_trainings_ran_is_told_whole(
    tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    part = long.PARTS["A10"]
    one = finished(long.training(protocol, part, long.rows_of(part)[0]), 0, 50.0, "long")
    machine = one.machine | {"gpu": "a GPU", "threads": 4, "processes": 2}
    results.write(tmp_path / "long", dataclasses.replace(one, machine=machine))
    page = "\n".join(section(collected(tmp_path, cpu, protocol), "x"))
    assert "; a GPU, 4 threads × 2 processes." in page


def test_a_gain_where_the_paper_has_a_loss(
    tmp_path: Path, cpu: Protocol, protocol: Protocol
) -> None:
    write_long(tmp_path, protocol, "A", PAPER_A | {"HVT-Ti-1": [56.0, 56.2]})
    reported = words(collected(tmp_path, cpu, protocol))
    assert reported[("2a", "A")] == "holds, the other way round"
    assert reported[("5b", "A")] == "does not hold"


def test_rows_that_were_not_run(tmp_path: Path, cpu: Protocol, protocol: Protocol) -> None:
    nothing = collected(tmp_path, cpu, protocol)
    assert set(words(nothing).values()) == {"not run"}
    assert set(outcomes(nothing).values()) == {"not run"}
    assert "Of 23 trainings, 0 have been run." in "\n".join(section(nothing, "x"))
    write_long(tmp_path, protocol, "A", {"DeiT-Ti": [54.0], "HVT-Ti-1": [52.0]})
    some = collected(tmp_path, cpu, protocol)
    reported = words(some)
    # Two seeds of no row: nothing is known of their spread.
    assert reported[("2a", "A")] == "holds, not clearly"
    assert reported[("1", "A")] == reported[("5b", "A")] == "not run"
    page = "\n".join(section(some, "x"))
    row = "| A | DeiT-Ti | 8.0 | 0.104 | 40 | 54.00, seed 1 not run | 54.00 | 0.90 | +3.00 | no |"
    assert row in page
    assert "| A | HVT-Ti-0 | 7.9 | 0.104 | 40 | not run | not run |  |  |  |" in page
    assert "| HVT-Ti-1 − DeiT-Ti | not run | not run | not run | -2.00 |" in page
    assert "| Scale HVT-Ti-4 − DeiT-Ti | not run | not run | not run | not run |" in page
    assert "Of 23 trainings, 2 have been run." in page


def test_gaps_have_their_standard_error(
    as_predicted: Path, cpu: Protocol, protocol: Protocol
) -> None:
    page = "\n".join(section(collected(as_predicted, cpu, protocol), "x"))
    # Seeds that differ by 0.2 have a variance of 0.02: 0.02 for two means of two, 0.04 of one.
    assert "| HVT-Ti-1 − DeiT-Ti | +2.80 ± 0.14 | not run | -0.40 ± 0.20 | -2.00 ± 0.14 |" in page
    scaled = "| +10.10 ± 0.14 | +9.00 ± 0.20 | +7.00 ± 0.20 | +6.00 ± 0.14 |"
    assert f"| Scale HVT-Ti-4 − DeiT-Ti {scaled}" in page


def test_one_line_for_each_claim(as_predicted: Path, cpu: Protocol, protocol: Protocol) -> None:
    result = collected(as_predicted, cpu, protocol)
    table, legend = summary(result, {claim.number: {} for claim in CLAIMS}, "one pass")
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[2:]}
    assert len(lines) == 14
    assert lines["2a"].endswith("| – | – | holds (-2.00; paper -2.56) | – | – |")
    assert lines["5a"].endswith("| – | – | – | does not hold | holds for two and four stages |")
    assert "| holds for one stage (+2.50; paper +2.78) | holds |" in lines["5b"]
    assert lines["9"].endswith("| – | – | – | – | – |")
    assert "300 epochs of 5,000 images with 0.4 M parameters" in legend


def test_the_command_writes_page_and_image(
    as_predicted: Path, tmp_path: Path, capsys: Captured, cpu: Protocol, protocol: Protocol
) -> None:
    page = tmp_path / "page.md"
    stranger = long.training(protocol, long.PARTS["A10"], long.rows_of(long.PARTS["A10"])[0])
    recipe = dataclasses.replace(stranger.recipe, lr=1.0)
    other = finished(dataclasses.replace(stranger, recipe=recipe), 0, 50.0, "long")
    results.write(tmp_path / "more" / "long", other)  # and nothing of the CPU protocol
    flags = ["--results", str(as_predicted), "--results", str(tmp_path / "more")]
    assert main(["paper", "report", "--output", str(page), *flags]) == 0
    reported = capsys.readouterr()
    assert str(tmp_path / "page" / "gap.png") in reported.out.splitlines()
    assert f"1 trainings belong to no row of this protocol, such as {other.key}" in reported.err
    with Image.open(tmp_path / "page" / "gap.png") as image:
        assert image.format == "PNG"
    text = page.read_text()
    assert "## Verdicts" in text
    assert "(page/gap.png)" in text
    assert "\n\n".join(section(collected(as_predicted, cpu, protocol), "page")) in text


def test_a_recipe_in_place_of_the_cpu_protocol_s_leaves_long_as_it_is(
    as_predicted: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(FILES["cpu"].read_text().replace("\nepochs = 1", "\nepochs = 2"))
    page = tmp_path / "page.md"
    flags = ["--results", str(as_predicted), "--output", str(page)]
    assert main(["paper", "report", *flags]) == 0
    before = page.read_text().partition("## long\n")[2]
    shutil.copytree(as_predicted, tmp_path / "results")
    row = get_row(get_table("main"), "HVT-Ti-1")
    training = plan(load_protocol("cpu", own), row, "epochs", "cifar100").training
    for seed, top1 in enumerate((40.0, 60.0)):  # of the other recipe, whatever its spread
        results.write(tmp_path / "results" / "cpu", finished(training, seed, top1, "cpu"))
    flags[1] = str(tmp_path / "results")
    assert main(["paper", "report", "--protocol-file", str(own), *flags]) == 0
    opening, _, after = page.read_text().partition("## long\n")
    assert "Of 23 trainings, 23 have been run." in after
    assert after == before
    assert "| the recipe above, equal epochs |" in opening
    assert "one pass" not in opening
    assert "Seeds differ by 14.14 points (" in opening


def test_a_damaged_result_is_named(tmp_path: Path, capsys: Captured) -> None:
    for name in ("cpu", "long"):
        (tmp_path / name).mkdir()
    broken = tmp_path / "long" / "x-seed0.json"
    broken.write_text("{")
    flags = ["--results", str(tmp_path), "--output", str(tmp_path / "page.md")]
    assert main(["paper", "report", *flags]) == 2
    assert str(broken) in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
