"""spark-plan: what it prints, and what it says of settings that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from spark_megatron.checks import described
from spark_megatron.cli import plan

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "spark_tiny"
LARGE = {
    "model_type": "llama",
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""The sizes of Llama-3.1-405B."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The command in this process: what it prints."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["spark-plan", *arguments])
        plan.main()
        output, errors = capsys.readouterr()
        assert not errors
        return output

    return run


def lines(output: str) -> dict[str, list[str]]:
    """What is said behind each title."""
    found = {}
    for line in output.splitlines():
        title, _, rest = line.strip().partition("  ")
        if rest:
            found[title] = [cell.strip() for cell in rest.split("  ") if cell.strip()]
    return found


def test_a_small_model(run: Callable[..., str]) -> None:
    """Two stages, two nodes: of 1,074,432 weights in fp32 each rank lacks the other stage's, 4 layers and a norm being
    shared out over the two and the embedding being on both."""
    said = lines(run("reshard", f"model={TINY}", "ranks=4", "node=2", "pipeline=2", "dtype=fp32", "bucket_mb=0.1"))
    model, _ = described("model", TINY / "config.json")
    assert (model.layers, model.tied) == (4, True)
    assert said["model"] == ["qwen3, 1.07 M weights, 4.30 MB in fp32"]
    assert said["ranks"] == ["4 on 2 nodes"]
    assert said["trainer"] == ["pipeline 2 x data 2"]
    assert said["vLLM"] == ["tensor 1 x data 4"]
    assert said["a rank receives"] == ["1.97 MB", "1.97 MB", "1.97 MB", "1.97 MB", "1.000"]
    assert said["a rank keeps"] == ["2.33 MB", "2.33 MB", "2.33 MB"]
    assert said["into a node"] == ["1.97 MB", "1.97 MB", "1.97 MB", "1.97 MB", "1.000"]
    assert said["busiest sender"][0].startswith("rank ")


def test_nothing_to_move(run: Callable[..., str]) -> None:
    said = lines(run("reshard", f"model={TINY / 'config.json'}", "ranks=2"))
    assert said["ranks"] == ["2 on 1 node"]
    assert said["a rank receives"] == ["0 B", "0 B", "0 B", "0 B", "-"]
    assert said["busiest sender"] == ["none"]
    assert said["predicted time"] == ["0 s (0 s between nodes, meanwhile 0 s inside them, then 0 s to forward)"]


def test_every_setting_is_obeyed(run: Callable[..., str]) -> None:
    """Each changes what is said."""
    base = [f"model={TINY}", "ranks=8", "pipeline=2", "tensor=2", "sampler_tensor=1"]
    changes = [
        "ranks=16", "node=2", "tensor=1", "pipeline=1", "virtual=2", "context=2", "sampler_tensor=2", "dtype=fp32",
        "bucket_mb=0.01", "inside_gb_s=1e1",
    ]  # fmt: skip
    said = [run("reshard", *base, *changed).partition("made in")[0] for changed in [(), *((c,) for c in changes)]]
    said += [run("reshard", *base, "node=2", speed).partition("made in")[0] for speed in ("between_gb_s=7",)]
    assert len(set(said)) == len(said)


def test_experts(run: Callable[..., str], tmp_path: Path) -> None:
    """Expert ranks hold half of the experts each; tensor ranks need sequence parallelism then, which is implied."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = json.loads((TINY / "config.json").read_text()) | {"model_type": "qwen3_moe"} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("reshard", f"model={tmp_path}", "ranks=4", "dtype=fp32", "tensor=2", "sampler_tensor=2")
    said = lines(run(*arguments, "expert=2"))
    # 2 of 4 experts in 4 layers, 3 matrices of 64 x 128, of which each of two tensor ranks has a half, in 4 bytes
    lacking = 2 * 4 * 3 * 64 * 128 // 2 * 4
    assert said["a rank receives"][0] == f"{lacking / 1e3:.2f} kB"
    assert said["trainer"] == ["tensor 2 x expert 2 x data 2"]


def test_help_names_every_setting(run: Callable[..., str]) -> None:
    assert run() == run("--help") == run("reshard", "-h") == plan.usage() + "\n"
    listed = [line.split(":")[0].strip() for line in plan.usage().splitlines() if ":" in line]
    assert [name for name in listed if name in {field.name for field in fields(plan.Settings)}] == [
        field.name for field in fields(plan.Settings)
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("rehsard", "rehsard is no command; there is reshard: spark-plan reshard name=value ..."),
        ("reshard ranks=4", "model is missing: give it a value, model=..."),
        ("reshard model={tiny}", "ranks is missing: give it a value, ranks=..."),
        ("reshard model={tiny} ranks=4 tensr=2", "tensr=2: there is no setting tensr; did you mean tensor?"),
        ("reshard model={tiny} ranks=4 tensor=2.5", "tensor=2.5 must be a whole number"),
        ("reshard model={tiny} ranks=4 dtype=bf61", "dtype=bf61 is not a choice; did you mean bf16?"),
        ("reshard model={tiny} ranks=4 node=0", "node=0 must be a finite number greater than 0"),
        ("reshard model={tiny} ranks=4 between_gb_s=.inf", "between_gb_s=inf must be a finite number greater than 0"),
        (
            "reshard model={tiny} ranks=4 --verbose",
            "--verbose cannot be read: there is the option --help, all else is written name=value",
        ),
        ("reshard model=[ ranks=4", "model=[ ranks=4 cannot be read: write name=value"),
        ("reshard model=nowhere ranks=4", "model=nowhere is not a model directory: nowhere/config.json does not exist"),
        (
            "reshard model={tiny} ranks=6 tensor=4",
            "tensor=4 * pipeline=1 * context=1 does not divide ranks=6: choose degrees whose product does",
        ),
        (
            "reshard model={tiny} ranks=5 pipeline=5",
            "pipeline * virtual=5 does not divide the model's 4 layers: choose a degree that does",
        ),
        ("reshard model={tiny} ranks=4 virtual=2", "virtual=2 needs pipeline stages, but pipeline=1: set one of them"),
        (
            "reshard model={tiny} ranks=6 sampler_tensor=4",
            "sampler_tensor=4 does not divide ranks=6: choose a degree that does",
        ),
        (
            "reshard model={tiny} ranks=6 sampler_tensor=3",
            "sampler_tensor=3 does not divide the model's 4 attention heads: choose a degree that does",
        ),
    ],
)
def test_a_wrong_setting_ends_in_one_line(run: Callable[..., str], arguments: str, line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments.format(tiny=TINY).split())
    assert ended.value.code == f"spark-plan: {line}"


REPORT_LIBRARIES = """
import sys
from spark_megatron.cli import plan
plan.main()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "megatron", "vllm", "transformers", "hydra"}))
"""


def test_a_thousand_ranks_without_any_heavy_library(tmp_path: Path) -> None:
    """126 layers on 16 stages, embedding and head each taking the place of a layer: all stages hold nearly alike."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    settings = [f"model={tmp_path}", "ranks=1024", "tensor=8", "pipeline=16", "sampler_tensor=8"]
    command = [sys.executable, "-c", REPORT_LIBRARIES, "reshard", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *output, libraries = done.stdout.splitlines()
    assert libraries == "[]"
    assert max(map(len, output)) <= 100
    said = lines("\n".join(output))
    assert said["model"] == ["llama, 405.85 G weights, 811.71 GB in bf16"]
    assert said["ranks"] == ["1,024 on 128 nodes"]
    assert said["trainer"] == ["tensor 8 x pipeline 16 x data 8"]
    assert said["a rank receives"][-1] == said["into a node"][-1] == "1.000"
    receives, keeps = (float(said[f"a rank {what}"][1].removesuffix(" GB")) for what in ("receives", "keeps"))
    assert receives + keeps == pytest.approx(811.71 / 8, abs=0.01 + 0.01)  # its sampler's eighth of the model
