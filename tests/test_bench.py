"""Models are timed in turns, each as what it is, and the figures are those of its own cost."""

import csv
import io
import json
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from conftest import SMALL, Command, stir

import hvt
from hvt.bench.measure import interleaved
from hvt.bench.models import BenchModel, bench_model, modes_of, open_bench_model
from hvt.bench.peak import in_new_process, peak_memory
from hvt.bench.run import measure
from hvt.errors import HVTError
from hvt.zoo import write_config

Build = Callable[..., hvt.HVT]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("bench") / "small.safetensors"
    hvt.save(stir(hvt.create_model("hvt_ti_1", **SMALL | {"depth": 1})), path)
    return path


# Time


def test_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    interleaved({0: lambda: None}, torch.device("mps"), 0, 0.0, {})
    interleaved({0: lambda: None}, CPU, 0, 0.0, {})
    assert waited == [torch.device("mps")] * 2


def test_every_case_gets_its_turn_and_another_neighbour() -> None:
    called: list[str] = []
    runs = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times: dict[str, list[float]] = {}
    for turn in range(3):
        interleaved(runs, CPU, turn, 0.0, times)
    # One call that is not counted and one that is, from one further along each time.
    assert "".join(called) == "aabbcc" + "bbccaa" + "ccaabb"
    assert {name: len(result) for name, result in times.items()} == {"a": 3, "b": 3, "c": 3}
    each: dict[str, list[float]] = {}
    interleaved(runs, CPU, 0, 0.001, each)
    assert all(len(result) > 1 and sum(result) >= 0.001 for result in each.values())


# Models


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's peak is of no interest here."""
    monkeypatch.setattr("hvt.bench.measure.MATMUL_SIZES", (64, 96))


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BenchModel]:
    folder, modes = tmp_path_factory.mktemp("models"), ("eager", "onnx", "int8")
    return {mode: open_bench_model(str(checkpoint), mode, CPU, folder) for mode in modes}


def test_rows_are_of_the_models_own_cost(checkpoint: Path, models: dict[str, BenchModel]) -> None:
    opened = [models["eager"], models["onnx"]]
    memory = {(str(checkpoint), "onnx", 2): 5_000_000}
    rows = measure(opened, [1, 2], CPU, rounds=1, least=0.01, memory=memory)
    assert [(row.mode, row.batch) for row in rows] == [
        ("eager", 1), ("onnx", 1), ("eager", 2), ("onnx", 2),
    ]  # fmt: skip
    price = hvt.cost(hvt.load(checkpoint))
    for row in rows:
        assert (row.gflops, row.params_m) == (price.gflops, price.params_m)
        assert (row.library, row.pixels) == ("hvt", "64")
        assert row.images_per_s == pytest.approx(1e3 * row.batch / row.p50_ms)
        assert row.p50_ms <= row.p90_ms <= row.p99_ms
        assert row.gflop_per_s == pytest.approx(2 * price.gflops * row.images_per_s)
        assert row.share_of_peak == pytest.approx(row.gflop_per_s / row.matmul_peak_gflop_per_s)
        assert row.calls >= 1
    assert [row.peak_memory_mb for row in rows] == [None, None, None, 5.0]


@pytest.mark.slow
def test_compiled(checkpoint: Path, tmp_path: Path) -> None:
    opened = [open_bench_model(str(checkpoint), m, CPU, tmp_path) for m in ("eager", "compiled")]
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(opened[0].run(images), opened[1].run(images))


def test_a_model_of_timm(tmp_path: Path) -> None:
    opened = open_bench_model("deit_tiny_patch16_224", "eager", CPU, tmp_path)
    assert opened.library == "timm"
    assert opened.input_size == (3, 224, 224)
    assert opened.params_m == pytest.approx(hvt.cost("deit_ti").params_m)
    assert opened.gflops == pytest.approx(hvt.cost("deit_ti").gflops, rel=0.01)
    assert opened.call(2, CPU)().shape == (2, 1000)  # type: ignore[attr-defined]
    with pytest.raises(HVTError, match="test_vit is a timm model"):
        open_bench_model("test_vit", "onnx", CPU, tmp_path)


@pytest.mark.slow
def test_peak_memory_of_an_exported_file(build: Build, tmp_path: Path) -> None:
    model = build("hvt_ti_1", depth=1, num_heads=6, head_dim=64)
    opened = bench_model("named", model, "onnx", CPU, tmp_path)
    peaks = peak_memory(opened, [1, 64], CPU)
    assert list(peaks) == [1, 64]
    weights = 4 * hvt.cost(model).params
    assert weights < peaks[1] < peaks[64] < 1e9


def test_exported_modes_are_those_of_evaluation(
    models: dict[str, BenchModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised, and without dropout; peak memory is that of the file that is timed."""
    monkeypatch.setattr("hvt.bench.peak.in_new_process", lambda _, file, *args: file)
    training = hvt.create_model("hvt_ti_1", **SMALL | {"depth": 1, "drop_rate": 0.1}).train()
    for opened in (models["int8"], bench_model("a", training, "onnx", CPU, tmp_path)):
        file = peak_memory(opened, [1], CPU)
        kinds = {node.op_type for node in onnx.load(str(file)).graph.node}
        assert not any(kind.startswith(("Random", "Dropout", "Bernoulli")) for kind in kinds)
        assert ("QuantizeLinear" in kinds) == (opened.mode == "int8")


def test_peak_memory_of_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HVTError, match=r"^batch=100000000000000000000 does not fit into memory"):
        peak_memory(open_bench_model("test_vit", "eager", CPU, Path()), [10**20], CPU)

    def killed(*_: Any) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr("hvt.bench.peak.ProcessPoolExecutor", killed)
    with pytest.raises(HVTError, match="the process was killed: use a smaller batch"):
        in_new_process(print)


def test_a_batch_that_does_not_fit() -> None:
    for batch in (10**12, 10**17, 10**20):
        with pytest.raises(HVTError, match=rf"^batch={batch} does not fit into memory: use a sma"):
            measure([open_bench_model("test_vit", "eager", CPU, Path())], [batch], CPU)

    def run(images: torch.Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory" if len(images) > 1 else "x")

    opened = BenchModel("a", "eager", open_bench_model("test_vit", "eager", CPU, Path()).model, run)
    with pytest.raises(HVTError, match="batch=2 does not fit"):
        measure([opened], [2], CPU)
    with pytest.raises(RuntimeError, match="x"):
        measure([opened], [1], CPU)


def test_macs_that_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> None:
        raise NotImplementedError("no such kernel\nhere")

    monkeypatch.setattr("timm.models.vision_transformer.VisionTransformer.forward", forward)
    with pytest.raises(HVTError, match=r"of test_vit cannot be counted \(no such kernel\): leave"):
        _ = open_bench_model("test_vit", "eager", CPU, Path()).gflops


# The command


def test_the_command(
    command: Command,
    checkpoint: Path,
    models: dict[str, BenchModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("hvt.bench.run.BUSY", 0.0)  # as if something else ran as well
    int8 = models["int8"].model.path
    code, out, err = command(
        "bench", checkpoint, int8, "--batch", "2", "--rounds", 1,
        "--device", "cpu", "--no-memory", "--json", "--plot", tmp_path / "speed.svg",
    )  # fmt: skip
    assert code == 0
    assert "round 1 of 1" in err
    assert "the machine was busy" in err
    said = json.loads(out)
    assert said["busy"] is True
    assert [(row["model"], row["mode"]) for row in said["rows"]] == [
        (str(checkpoint), "eager"),
        (str(int8), "int8"),
    ]
    assert said["machine"]["torch"] == torch.__version__
    drawn = (tmp_path / "speed.svg").read_text()
    assert "<svg" in drawn


def test_the_command_as_a_table_and_as_csv(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name and of a saved config."""
    monkeypatch.chdir(tmp_path)
    write_config(hvt.get_config("deit_ti"), "plan.json")
    words = ("--img-size", 32, "--batch", 1, "--rounds", 1, "--no-memory", "--device", "cpu")
    code, out, _ = command("bench", "deit_ti", "plan.json", *words)
    assert code == 0
    first, heading, *rows = out.splitlines()
    assert f"torch {torch.__version__}" in first
    assert "GFLOP/s" in first
    assert heading.split()[:5] == ["model", "mode", "batch", "px", "GFLOPs"]
    gflops = f"{hvt.cost('deit_ti', img_size=32).gflops:.2f}"
    assert [row.split()[:5] for row in rows] == [
        [name, "eager", "1", "32", gflops] for name in ("deit_ti", "plan.json")
    ]
    (row,) = csv.DictReader(io.StringIO(command("bench", "deit_ti", *words, "--csv")[1]))
    assert (row["mode"], row["torch"]) == ("eager", torch.__version__)
    assert float(row["images_per_s"]) > 0


def test_modes_that_a_model_has() -> None:
    assert modes_of("hvt_s_1", ["eager", "int8"]) == ["eager", "int8"]
    assert modes_of("resnet18", ["onnx", "eager"]) == ["eager"]
    assert modes_of("a/model.safetensors", ["onnx", "eager"]) == ["onnx", "eager"]
    assert len(modes_of("a/model.onnx", ["onnx", "eager"])) == 1


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = command("bench", "hvt_s_1", "--plot", "speed.png")
    assert (code, out) == (2, "")
    assert err == "hvt: drawing needs matplotlib: pip install 'hvt[plot]'\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hvt_s_9",), "'hvt_s_9' is neither a model nor a checkpoint: did you mean hvt_s_"),
        (("hvt_s_1", "--modes", "onx"), "must be a list of eager or compiled or onnx or int8"),
        (("hvt_s_1", "resnet18", "--img-size", "64"), "--img-size is not for resnet18, which has"),
        (
            ("resnet18", "--modes", "onnx"),
            "resnet18 is a timm model, which cannot be timed as onnx",
        ),
        (("hvt_s_1", "--batch", "1,zero"), "batch='1,zero' must be whole numbers of at least 1"),
    ],
)
def test_bad_input(command: Command, words: tuple[str, ...], message: str) -> None:
    code, out, err = command("bench", *words)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
