"""spark-eval as a user meets it: what it refuses, and what it makes of the shipped model."""

import contextlib
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.cli import eval as command
from spark_megatron.cli.compose import groups
from spark_megatron.cli.eval_settings import ROOT, load
from spark_megatron.schema import ConfigError
from tests.cli.runs import REPOSITORY

SMALL = (
    f"model.path={REPOSITORY / 'examples/models/spark_tiny'}", "items=24", "test_time=compare",
    "rollout.samples_per_task=2", "ks=[1,2]", "batch=16",
)  # fmt: skip


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([SMALL[0], *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


REFUSED = {
    "test_tim=vote": "test_tim=vote: there is no setting test_tim; did you mean test_time?",
    "test_time=votes": "test_time=votes does not exist; did you mean vote?",
    "test_time.round=1": "test_time.round=1: there is no setting test_time.round; did you mean test_time.rounds?",
    "+optim.lr=1": "optim.lr=1: there is no setting optim.lr",
    "test_time.methods=[votes]": "test_time.methods[0]=votes is not a choice; did you mean vote?",
    "rollout.probe_every=3": "rollout.probe_every=3: there is no setting rollout.probe_every in an evaluation",
    "judge.verifier=choise": "judge.verifier=choise is no key of verifiers; did you mean choice?",
    "items=-1": "items=-1 must be 0 or more",
    "items=0": "items=0 and benchmark=none: nothing is left to evaluate",
    "ks=[0]": "ks[0]=0 must be 1 or more",
    "ks=[9]": "ks=[9] with rollout.samples_per_task=8: there are not as many answers",
    "test_time.rounds=-1": "test_time.rounds=-1 must be 0 or more",
    "rollout.temperature=0": "rollout.temperature=0.0 must be a finite number greater than 0",
    "rollout.max_new_tokens=128": "rollout.max_new_tokens=128 leaves no room for a prompt",
    "rollout.backend.weights=fp8_blocks": "rollout.backend.weights=fp8_blocks: without a trainer",
    "rollout.backend.tensor_parallel=2": "rollout.backend.tensor_parallel=2 does not divide ranks=1",
    "model.path=nowhere": "model.path=nowhere is not a model directory",
    "test_time=vote rollout.samples_per_task=0": "test_time.methods=['vote'] with rollout.samples_per_task=0",
    "benchmark=verify_bench": "benchmark.VerifyBench.path=benchmarks/verify_bench.jsonl: there is no such file",
    "benchmark=gsm8k": "benchmark.GSM8k.source.rows.paths='benchmarks/gsm8k.jsonl': there is no such file",
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_setting_is_refused_before_anything_starts(overrides: str, message: str) -> None:
    assert refusal(*overrides.split()).startswith(message)


@pytest.mark.parametrize("choice", groups(ROOT)["test_time"])
def test_every_method_of_test_time_can_be_chosen(choice: str) -> None:
    config = load([SMALL[0], f"test_time={choice}"])[1]
    expected = {"none": (), "compare": ("reflect", "vote", "best_of_n")}.get(choice, (choice,))
    assert config.test_time.methods == expected
    assert (config.test_time.rounds, config.test_time.score) == (2, "soft")


def test_the_benchmarks_have_the_names_of_the_paper_s_columns() -> None:
    from spark_megatron.cli.compose import compose_config
    from spark_megatron.eval.tables import PAPER

    text = compose_config(["benchmark=paper_text"], ROOT).benchmark
    wanted = [column for columns in PAPER["Table 2"].values() for column in columns if column != "RB2-Math"]
    assert list(text) == wanted
    assert {"RB2", "VL-RB"} <= set(compose_config(["benchmark=judging"], ROOT).benchmark)
    assert {"RB2", "VL-RB"} <= set(PAPER["Table 1"]["Avg-R"])


def results(run_dir: Path) -> dict[tuple[str, str, int | None], dict[str, Any]]:
    figures = json.loads((run_dir / "results.json").read_text())["figures"]
    return {(row["set"], row["measure"], row.get("effort")): row for row in figures}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of an evaluation by transformers, with a benchmark of each kind, and what it printed."""
    directory = tmp_path_factory.mktemp("eval")
    questions = [{"question": f"{i} + 2 + 3", "answer": f"#### {i + 5}"} for i in range(10)]
    answers = [{"question": "1 + 2", "answer": "3", "completion": c, "gold_correct": c == "3"} for c in "345"]
    for name, rows in {"questions": questions, "answers": answers}.items():
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judging = {
        "_target_": "spark_megatron.eval.benchmarks.WithReference", "path": f"'{directory / 'answers.jsonl'}'",
        "template": "'Judge: {question} = {shown} {reference} \\boxed{}'", "labels": "[Yes,No]",
        "judge_verifier": "choice", "subset_field": "null",
    }  # fmt: skip
    config = load([
        *SMALL, "rollout=transformers", f"run_dir={directory}", "benchmark=gsm8k",
        f"benchmark.GSM8k.source.rows.paths='{directory / 'questions.jsonl'}'",
        "benchmark.GSM8k.source.instruction='Solve: {question} \\boxed{}'",
        *(f"+benchmark.VerifyBench.{name}={value}" for name, value in judging.items()),
    ])[1]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        command.evaluate(config)
    return directory, out.getvalue()


def test_the_figures_and_their_files(reference: tuple[Path, str]) -> None:
    directory, said = reference
    found = results(directory)
    greedy, first = found["held-out", "greedy", None], found["held-out", "reflect", 0]
    assert greedy["n"] == 24
    assert 0.3 < greedy["accuracy"] == first["accuracy"] < 0.9  # 57 % of 500 items
    assert first["calls"] == 24
    assert 24 < found["held-out", "reflect", 1]["calls"] <= found["held-out", "reflect", 2]["calls"] <= 24 * 5
    assert found["held-out", "vote", 2]["calls"] == 48 <= found["held-out", "best_of_n", 2]["calls"] <= 48 * 2
    assert found["held-out", "pass@1", None]["accuracy"] == found["held-out", "mean@2", None]["accuracy"]
    assert found["held-out", "pass@2", None]["accuracy"] >= found["held-out", "pass@1", None]["accuracy"]
    budget = min(found["held-out", m, e]["tokens"] for m, e in (("reflect", 2), ("vote", 2), ("best_of_n", 2)))
    assert found["held-out", "vote at equal tokens", None]["tokens"] == budget
    assert found["VerifyBench", "judging", None]["n"] == 3
    with (directory / "results.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(found)
    with (directory / "table_2.csv").open() as stream:
        rows = {row[""]: row for row in csv.DictReader(stream)}
    assert float(rows["greedy"]["GSM8k"]) == found["GSM8k", "greedy", None]["accuracy"]
    assert float(rows["reflect"]["GSM8k"]) == found["GSM8k", "reflect", 2]["accuracy"]
    assert rows["greedy"]["RB2"] == ""
    assert (directory / "tokens.png").read_bytes()[1:4] == b"PNG"
    for line in ("held-out: answers: 24/24, took 0:00:0", "held-out: solving", "VerifyBench: judging: 3/3"):
        assert line in said


@pytest.mark.slow
def test_vllm_reads_the_same_weights(reference: tuple[Path, str], tmp_path: Path) -> None:
    """The command itself, on another sampler: greedy figures of the two agree, and it says what it has written."""
    process = subprocess.run(
        [sys.executable, "-m", "spark_megatron.cli.eval", *SMALL, f"run_dir={tmp_path}"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    expected, found = results(reference[0]), results(tmp_path)
    for key in (("held-out", "greedy", None), *(("held-out", "reflect", effort) for effort in (0, 1, 2))):
        assert found[key] == expected[key]
    assert f"done: {tmp_path}" in process.stderr
    assert json.loads((tmp_path / "provenance.json").read_text())["packages"]["torch"]
    assert (tmp_path / "config.yaml").read_text().count("test_time:") == 1


def test_help_and_unknown_options() -> None:
    assert "  test_time  best_of_n, compare, none, reflect, vote" in command.usage().splitlines()
    process = subprocess.run(
        [sys.executable, "-m", "spark_megatron.cli.eval", "--chek"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert process.returncode == 1
    assert process.stderr == "spark-eval: --chek is no option; there are --help and --check, all else is name=value\n"
