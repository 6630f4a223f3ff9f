"""The rows of the paper's tables, trained small and for real, and the tables that they fill."""

import csv
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from training import Interrupting, quiet

import hvt
from hvt import HVTError
from hvt.paper.tables import PaperRow, PaperTable
from hvt.training.interrupt import Interrupted
from reproduction import long, results, run
from reproduction.__main__ import main
from reproduction.protocol import BUDGETS, Protocol, Training, load_protocol, plan
from reproduction.results import Known
from reproduction.rows import get_table, trainable

Captured = pytest.CaptureFixture[str]

ROOT = Path(__file__).parents[1]

# Seconds instead of minutes: 8×8 digits, 3 blocks for the paper's 12, ten steps.
TINY = """
model = "deit_ti"
data = "digits"
epochs = 2
batch_size = 240
lr = 0.05
warmup_epochs = 0.5
repeats = 1
mixup = 0.0
cutmix = 0.0
rand_augment = ""
color_jitter = 0.0
erase = 0.0
flip = 0.0
padding = 1
ema = 0.0
device = "cpu"
threads = 1
workers = 0

[overrides]
img_size = 8
patch_size = 2
head_dim = 4
depth = 3
drop_path_rate = 0.0
"""


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("protocol") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def tiny(tiny_file: Path) -> Protocol:
    return load_protocol("cpu", tiny_file)


@pytest.fixture(scope="module")
def cpu() -> Protocol:
    return load_protocol("cpu")


def a_row(table: str, name: str) -> PaperRow:
    return get_table(table).row(name)


def trained(table: str, name: str, protocol: Protocol, budget: str = "epochs") -> Training:
    return plan(protocol, a_row(table, name), budget, next(iter(protocol.recipes)))


def tables() -> list[PaperTable]:
    return [table for name, table in trainable().items() if name != "figure4"]


# ── what a row becomes ──────────────────────────────────────────────────────────────────────────


def test_the_full_protocol_is_the_paper_s() -> None:
    full = load_protocol("full")
    for table in tables():
        source = full.data_of(table)
        assert source == ("imagenet" if table.name == "main" else "cifar100")
        for row in table.rows:
            training = plan(full, row, "epochs", source)
            named = hvt.get_config(row.model.removesuffix("_power"), **row.overrides)
            assert training.config == named.replace(num_classes=training.config.num_classes)
            assert training.recipe.epochs == 300
            assert training.recipe.batch_size == (1024 if source == "imagenet" else 128)
    stages = get_table("pooling_stages")
    assert full.data_of(stages, "imagenet") == "imagenet"
    with pytest.raises(HVTError, match="no data 'imagnet': did you mean imagenet"):
        full.data_of(stages, "imagnet")


def test_budgets(cpu: Protocol) -> None:
    epochs = cpu.recipes["cifar100"].epochs
    reference = trained("main", "DeiT-Ti", cpu)
    for row in (row for table in tables() for row in table.rows):
        assert plan(cpu, row, "epochs", "cifar100").recipe.epochs == epochs
        bought = plan(cpu, row, "compute", "cifar100")
        share = bought.training_macs / reference.training_macs
        assert share == pytest.approx(1, abs=0.1 if row.power else 0.03)


def test_a_key_follows_what_is_learned_and_nothing_else(tiny: Protocol) -> None:
    training = trained("main", "HVT-Ti-1", tiny)

    def key(**values: Any) -> str:
        return dataclasses.replace(training, recipe=training.recipe.replace(**values)).key

    assert training.key == "hvt_w12_l3_m1_n16-2ep-c6e7c311"
    assert key(root="elsewhere", threads=7, workers=3, device="cuda", output="x") == training.key
    others = [key(lr=0.1), key(epochs=3), key(flip=0.5), key(batch_size=120), key(data="cifar10")]
    assert len({training.key, *others}) == 6


def test_committed_results_are_found_again(cpu: Protocol) -> None:
    """Their file names carry a digest of the recipe: rows, seeds and steps are not to change."""
    folder = ROOT / results.FOLDER
    if not folder.exists():
        pytest.skip("a source distribution has no results")
    planned = {
        "cpu": run.jobs(cpu, trainable().values(), BUDGETS),
        "long": run.jobs(load_protocol("long"), long.PARTS.values()),
    }
    missing = {"cpu": 0, "long": 1}  # the first seed of part P was not run
    for protocol, jobs in planned.items():
        found = {path.stem for path in (folder / protocol).glob("*.json")}
        names = {job.name for job in jobs}
        assert found <= names
        assert len(names - found) == missing[protocol]


def test_power_takes_three_steps(cpu: Protocol) -> None:
    row = a_row("main", "DeiT-Ti + PoWER")
    equal, bought = (plan(cpu, row, budget, "cifar100") for budget in BUDGETS)
    steps = equal.power
    assert steps is not None
    assert steps.share == pytest.approx(0.8 / 1.25, abs=0.01)
    # Results of another search are not this one's.
    before = dataclasses.replace(equal, power=dataclasses.replace(steps, method=1))
    assert before.key != equal.key
    assert equal.base.key == trained("main", "DeiT-Ti", cpu).key != equal.key
    assert equal.training_macs > equal.base.training_macs
    assert bought.training_macs < equal.training_macs


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_are_parts_of_like_cost(cpu: Protocol, count: int) -> None:
    jobs = run.jobs(cpu, tables(), BUDGETS)
    parts = [run.shard(jobs, index, count) for index in range(1, count + 1)]
    assert sorted(job.name for part in parts for job in part) == sorted(job.name for job in jobs)
    costs = [sum(job.training.training_macs for job in part) for part in parts]
    assert max(costs) < 1.2 * min(costs)
    for part in parts:  # what PoWER prunes is where PoWER is
        elsewhere = {job.name for job in jobs} - {job.name for job in part}
        assert not {job.base.name for job in part} & elsewhere


def test_sizes_must_scale_to_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TINY.replace("depth = 3", "depth = 7"))
    with pytest.raises(HVTError, match=r"depth=16 of the paper would become 9\.33333"):
        trained("num_blocks", "L=16", load_protocol("cpu", path))


# ── training for real ───────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Here:
    """A folder to run in."""

    folder: Path
    file: Path
    protocol: Protocol

    def place(self) -> run.Place:
        return run.Place(self.folder / "results" / "cpu", self.folder / "runs" / "cpu", {})

    def flags(self) -> list[str]:
        own = ["--results", str(self.folder / "results"), "--runs", str(self.folder / "runs")]
        return ["--protocol-file", str(self.file), *own]

    def known(self) -> Known:
        return results.read_all([self.folder / "results" / "cpu"])

    def job(self, table: str, name: str) -> run.Job:
        (job,) = run.jobs(self.protocol, [get_table(table)], ("epochs",), (0,), [name])
        return job


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_file: Path, tiny: Protocol) -> Here:
    """Pooling kinds trained from the command line, the maximum with two seeds."""
    made = Here(tmp_path_factory.mktemp("here"), tiny_file, tiny)
    assert main(["run", "pool_type", "--budget", "epochs", *made.flags()]) == 0
    command = ["run", "pooling_stages", "--row", "M=4", "--seeds", "1"]
    assert main([*command, "--budget", "epochs", *made.flags()]) == 0
    return made


def test_a_run_leaves_a_file_for_each_training(here: Here) -> None:
    known = here.known()
    keys = {trained("pool_type", name, here.protocol).key for name in ("Conv", "Avg", "Max")}
    assert known.keys() == keys
    training = trained("pool_type", "Max", here.protocol)
    first, second = known[training.key]
    assert (first.seed, second.seed) == (0, 1)
    assert first.command.startswith(
        "python -m reproduction run pool_type --protocol cpu --budget epochs --row Max --seeds 0"
    )
    assert "run pooling_stages" in second.command
    assert "--row M=4 --seeds 1" in second.command
    assert first.top1 != second.top1
    assert first.epochs == len(first.curve) == 2
    assert first.machine["threads"] == 1
    assert first.seconds is not None
    assert first.images_per_second == pytest.approx(2 * 1200 / first.seconds)
    assert hvt.HVTConfig.from_dict(first.config) == training.config
    assert (first.recipe["lr"], first.recipe["seed"], second.recipe["seed"]) == (0.05, 0, 1)
    # The last weights' top-1 is what is reported, whatever the test images would have preferred.
    with (here.place().runs / first.name / "metrics.csv").open() as file:
        *_, last = csv.DictReader(file)
    for what in ("loss", "top1", "top5"):
        assert float(last[f"val_{what}"]) == getattr(first, what)
    assert first.top1 == first.curve[-1]["val_top1"]


def test_what_is_done_is_skipped(here: Here, capsys: Captured) -> None:
    before = {p: p.stat().st_mtime_ns for p in (here.folder / "results").rglob("*.json")}
    assert main(["run", "pool_type", "--budget", "epochs", *here.flags()]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 trainings are done" in out
    assert "epoch 1/2" not in out
    assert "Max" in out  # the filled table
    after = {p: p.stat().st_mtime_ns for p in (here.folder / "results").rglob("*.json")}
    assert after == before


def test_other_tables_have_what_they_share(here: Here, capsys: Captured) -> None:
    budget = ["--budget", "epochs", "--dry-run", "--shard", "1/1"]
    assert main(["run", "resolution", "patch_size", "num_heads", *budget, *here.flags()]) == 0
    out = capsys.readouterr().out
    assert "1 of 9 trainings are done; the rest takes about" in out
    (shared,) = [line for line in out.splitlines() if " done " in line and "2ep" in line]
    assert "resolution: 224, patch_size: P=16, num_heads: heads=6" in shared
    assert "to do" in out


def test_an_interrupted_row_resumes(here: Here, tmp_path: Path) -> None:
    job, place = here.job("pool_type", "Avg"), Here(tmp_path, here.file, here.protocol).place()
    with pytest.raises(Interrupted, match="stopped after epoch 1; the same command resumes"):
        run.run_job(job, here.protocol, place, Console(file=Interrupting("epoch 1/2"), width=200))
    assert not run.is_done(job, place)
    assert run.has_begun(job, place)
    printed = io.StringIO()
    finished = run.run_job(job, here.protocol, place, Console(file=printed, width=200))
    assert "epoch 2/2" in printed.getvalue()
    assert "epoch 1/2" not in printed.getvalue()
    assert run.is_done(job, place)
    (uninterrupted,) = here.known()[job.training.key]
    assert finished.curve == uninterrupted.curve
    assert (finished.top1, finished.loss) == (uninterrupted.top1, uninterrupted.loss)
    assert finished.seconds is None  # as the first epoch's are not known any more
    # A result that was lost comes back from the run.
    (place.results / f"{job.name}.json").unlink()
    again = run.run_job(job, here.protocol, place, quiet())
    assert (again.top1, again.curve) == (finished.top1, finished.curve)
    # A run that was made longer by hand is not the row's any more.
    path = place.runs / job.name / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epochs": 3}))
    with pytest.raises(HVTError, match="its epochs is 3, the row's is 2; move it away"):
        run.run_job(job, here.protocol, place, quiet())


def test_ctrl_c_in_the_last_epoch(
    here: Here, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is done, and the last."""
    other = Here(tmp_path, here.file, here.protocol)
    screen = Console(file=Interrupting("epoch 2/2"), width=200)
    monkeypatch.setattr("reproduction.__main__.new_console", lambda: screen)
    row = ["--row", "Max", "--budget", "epochs"]
    assert main(["run", "pool_type", *row, *other.flags()]) == 130
    assert "the same command does the rest" in capsys.readouterr().err
    assert len(other.known()) == 1


def test_a_row_with_power(here: Here, tmp_path: Path) -> None:
    other = Here(tmp_path, here.file, here.protocol)
    row = ["--row", "DeiT-Ti + PoWER", "--seeds", "0", "--budget", "epochs"]
    assert main(["run", "main", *row, *other.flags()]) == 0
    ((result,),) = other.known().values()
    config = hvt.HVTConfig.from_dict(result.config)
    whole = hvt.cost(config.replace(retention=None)).macs
    assert config.retention is not None
    assert hvt.cost(config).macs <= (0.8 / 1.25 + 0.01) * whole
    assert result.epochs == pytest.approx(2 + 2 * 0.667)
    assert result.seconds is not None
    # As a stop between search and retraining leaves it: the search's result is used.
    job, place = here.job("main", "DeiT-Ti + PoWER"), other.place()
    searched = place.runs / job.name / "searched.safetensors"
    kept = searched.read_bytes()
    shutil.rmtree(searched.parent)
    searched.parent.mkdir()
    searched.write_bytes(kept)
    again = run.run_job(job, here.protocol, place, quiet())
    assert again.top1 == result.top1
    assert searched.read_bytes() == kept


def test_a_part_of_long_runs(tiny_file: Path, tmp_path: Path, capsys: Captured) -> None:
    argv = [
        "run", "long", "--part", "A10", "--row", "HVT-Ti-1", "--protocol-file", str(tiny_file),
        "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"),
    ]  # fmt: skip
    assert main(argv) == 0
    (path,) = (tmp_path / "results" / "long").glob("*.json")
    result = json.loads(path.read_text())
    assert result["protocol"] == "long"
    assert len(result["curve"]) == 10
    assert "--part A10 --row HVT-Ti-1" in result["command"]
    capsys.readouterr()
    assert main(argv) == 0
    assert "1 of 1 trainings are done" in capsys.readouterr().out


# ── result files ────────────────────────────────────────────────────────────────────────────────


def test_the_error_names_a_damaged_result(here: Here, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(here.folder / "results", tmp_path / "results")
    (broken,) = (tmp_path / "results/cpu").glob(f"{here.job('pool_type', 'Avg').name}*")
    broken.write_text(broken.read_text()[:500])
    own = ["--protocol-file", str(here.file), "--results", str(tmp_path / "results")]
    for command in (["run", "pool_type"], ["report", "--output", str(tmp_path / "page.md")]):
        assert main([*command, *own]) == 2
        error = capsys.readouterr().err
        assert str(broken) in error
        assert "is not a readable result (JSONDecodeError" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("change", [{"seconds": 9.0}, {"top1": 9.0}])
def test_two_results_of_one_training_must_agree(
    here: Here, tmp_path: Path, change: dict[str, Any]
) -> None:
    (one,) = here.known()[here.job("pool_type", "Avg").training.key]
    first = results.write(tmp_path / "a" / "cpu", one)
    second = results.write(tmp_path / "b" / "cpu", dataclasses.replace(one, **change))
    folders = [first.parent, second.parent]
    if "top1" not in change:  # copies; the times of a machine are its own
        assert results.read_all(folders) == {one.key: [one]}
        return
    with pytest.raises(HVTError, match="different figures of one training") as caught:
        results.read_all(folders)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


# ── tables and figures ──────────────────────────────────────────────────────────────────────────


def test_the_committed_results_fill_the_tables(tmp_path: Path) -> None:
    folder = ROOT / results.FOLDER
    if not folder.exists():
        pytest.skip("a source distribution has no results")
    output = tmp_path / "tables.md"
    assert main(["report", "--results", str(folder), "--output", str(output)]) == 0
    text = output.read_text()
    assert "| 20.93 ± 0.07 (n = 3) |" in text  # DeiT-Ti after one epoch
    assert text.count("not run") == 0
    assert "| HVT-Ti-0 |" in text  # beside DeiT: what dropping the class token gives
    assert {path.name for path in tmp_path.glob("*.png")} == {"figure1.png", "figure4.png"}


# ── bad input ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "pool_typ"], "the paper has no table 'pool_typ': did you mean pool_type?"),
        (["run", "pool_type", "--row", "Maxx"], "there is no row 'Maxx': did you mean Max?"),
        (["run", "scalability"], "scalability has only costs"),
        (["run", "main", "--shard", "3/2"], "'3/2' must be one part of some"),
        (["run", "main", "--seeds", "0,x"], "seeds='0,x' must be whole numbers of at least 0"),
        (["run", "main", "--protocol", "gpu"], "unknown protocol 'gpu'"),
        (["run", "main", "--data", "digits"], "the protocol cpu has no data 'digits'"),
        (["run", "long", "--part", "D"], "unknown part 'D'"),
        (["run", "long", "main"], "long has parts of its own"),
        (["run", "main", "--part", "A"], "--part belongs to long"),
        (["run", "long", "--budget", "compute"], "--budget is for tables"),
        (["report", "--results", "nowhere"], "there is no result in nowhere/cpu"),
        (["run", "cls_token", "--root", "no", "--workers", "0"], "cifar100 is not in no"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(argv)
    except SystemExit as stop:  # how argparse leaves
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))
