from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from spark_megatron.cli.nodes import check_nodes
from spark_megatron.schema import ConfigError
from tests.settings import composed

ALGOS = "spark_megatron.algos"
CONSTANT = f"{ALGOS}.kl_schedules.constant.Constant"
SAMPLER = "spark_megatron.rollout.vllm.VLLMSampler"
LOOP = "spark_megatron.trainers.spark"


def refusal(directory: Path, *overrides: str) -> str:
    """The one line with which the settings are refused."""
    with pytest.raises(ConfigError) as caught:
        values = OmegaConf.to_container(composed(directory, *overrides), resolve=True)
        assert isinstance(values, dict)
        check_nodes(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


UNKNOWN_ARGUMENTS = {
    "+advantage.epss=1": f"advantage.epss=1: {ALGOS}.advantages.ZScore takes no argument epss; "
    "did you mean advantage.eps?",
    "+kl_schedule.foo=1": f"kl_schedule.foo=1: {CONSTANT} takes no argument foo; valid are kl_schedule.value",
    "+kl_schedule._partial=true": f"kl_schedule._partial=true: {CONSTANT} takes no argument _partial; "
    "valid are kl_schedule.value",
    "+recycle.bank.nam=full": "recycle.bank.nam=full: spark_megatron.recycle.templates.load_bank takes no argument "
    "nam; did you mean recycle.bank.name?",
    "+verifiers.choice.choises=[]": "verifiers.choice.choises=[]: spark_megatron.rewards.verdict.ChoiceVerifier takes "
    "no argument choises; did you mean verifiers.choice.choices?",
    "+rollout.backend.kv_cash_mb=1": f"rollout.backend.kv_cash_mb=1: {SAMPLER} takes no argument kv_cash_mb; "
    "did you mean rollout.backend.kv_cache_mb?",
    "+rollout.backend.dtype=bf16": f"rollout.backend.dtype=bf16: {SAMPLER} takes no argument dtype; "
    "valid are rollout.backend.kv_cache_mb, rollout.backend.max_batched_tokens, rollout.backend.max_model_len, "
    "rollout.backend.max_sequences, rollout.backend.prefix_cache, rollout.backend.sleep_level, "
    "rollout.backend.tensor_parallel, rollout.backend.weights",
    "+objective.kl_estimator.logp=1": f"objective.kl_estimator.logp=1: {ALGOS}.kl.k3 takes no argument logp",
    "+trainer.loop.parts=1": f"trainer.loop.parts=1: {LOOP}.train takes no argument parts",
    "+trainer.loop.steps=1": f"trainer.loop.steps=1: {LOOP}.train takes no argument steps",
}


@pytest.mark.parametrize(("override", "message"), UNKNOWN_ARGUMENTS.items(), ids=UNKNOWN_ARGUMENTS)
def test_an_argument_that_does_not_exist(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override) == message


MISSING = {
    "~kl_schedule.value": (CONSTANT, "kl_schedule.value"),
    "~recycle.max_judge": ("spark_megatron.recycle.mixture.Recycler", "recycle.max_judge"),
    "~rollout.backend.kv_cache_mb": (SAMPLER, "rollout.backend.kv_cache_mb"),
    "~demonstrations.bank": ("spark_megatron.data.demonstrations.Demonstrations", "demonstrations.bank"),
}


@pytest.mark.parametrize(("override", "expected"), MISSING.items(), ids=MISSING)
def test_a_missing_argument(tmp_path: Path, override: str, expected: tuple[str, str]) -> None:
    target, name = expected
    assert refusal(tmp_path, override) == f"{name} is missing: {target} needs it, give it a value, {name}=..."


TARGETS = {
    f"advantage._target_={ALGOS}.advantages.ZScor": f"{ALGOS}.advantages has no class or function ZScor; "
    "did you mean ZScore?",
    f"objective.kl_estimator._target_={ALGOS}.kl.k4": f"{ALGOS}.kl has no class or function k4; "
    "valid are KLEstimator, k1, k2, k3",
    "advantage._target_=nosuch.module.X": "No module named 'nosuch'",
    "advantage._target_=spark_megatron": "give the full name of a class or function",
    f"advantage._target_={ALGOS}.unified.COUNT_OF": f"{ALGOS}.unified has no class or function COUNT_OF; valid are ",
    f"trainer.loop._target_={LOOP}.trian": f"{LOOP} has no class or function trian; did you mean train?",
    "trainer.loop._target_=spark_megatron.trainers.sparc.train": "no module named 'spark_megatron.trainers.sparc'",
}


@pytest.mark.parametrize(("override", "reason"), TARGETS.items(), ids=TARGETS)
def test_a_target_that_cannot_be_imported(tmp_path: Path, override: str, reason: str) -> None:
    assert refusal(tmp_path, override).startswith(f"{override} cannot be imported: {reason}")


def test_a_strategy_without_target(tmp_path: Path) -> None:
    message = "advantage._target_ is missing: give it a class, advantage._target_=..."
    assert refusal(tmp_path, "~advantage._target_") == message


TYPES = {
    "advantage.eps=abc": "advantage.eps='abc' must be a number",
    "advantage.unbiased=3": "advantage.unbiased=3 must be true or false",
    "advantage.baseline=median": "advantage.baseline=median is not a choice; did you mean mean?",
    "rollout.backend.kv_cache_mb=1.5": "rollout.backend.kv_cache_mb=1.5 must be a whole number",
    "data.source.size=1.5": "data.source.size=1.5 must be a whole number",
    "recycle.judge_view=foo": "recycle.judge_view=foo is not a choice; valid are answer, both, cot",
    "recycle.bank=concise": "recycle.bank=concise must be a node with the _target_ of a Bank",
    "verifiers.math.symbolic=3": "verifiers.math.symbolic=3 must be a node with the _target_ of a SymbolicChecker",
}


@pytest.mark.parametrize(("override", "message"), TYPES.items(), ids=TYPES)
def test_an_argument_of_another_type(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override) == message


REFUSED_BY_THE_CLASS = {
    "advantage.eps=-1": "advantage.eps=-1 must be",
    "policy_loss.clip_low=2": "policy_loss.clip_low=2 must lie in (0, 1]",
    "kl_schedule.value=-1": "kl_schedule.value=-1 must be",
    "weight_schedule.values.policy=-1": "weight_schedule.values.policy=-1 must be",
    "+weight_schedule.values.polic=1": "weight_schedule.values has the keys",
    "recycle.pairwise_prob=2": "recycle.pairwise_prob=2: must lie in [0, 1]",
    "recycle.bank.name=ful": "recycle.bank: unknown template bank 'ful'",
    "demonstrations.demonstrator.slip_prob=2": "demonstrations.demonstrator.slip_prob=2: must lie in [0, 1]",
    "demonstrations.shares.solve=-1": "demonstrations.shares={'solve': -1, ",
    "verifiers.choice.choices=[[Yes]]": "verifiers.choice.choices=[['Yes']]: each set needs",
    "data.source.dataset=chain_sums": "data.source.dataset='chain_sums': not in reasoning-gym; nearest: 'chain_sum'",
    "+data.source.params.foo=3": "data.source.params={",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_BY_THE_CLASS.items(), ids=REFUSED_BY_THE_CLASS)
def test_a_value_that_the_class_refuses(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["_target_=Truncated", "cap=0.5"], "correction.cap=0.5 must be a finite number >= 1"),
        (["_target_=Truncated"], "correction.cap is missing"),
        (["_target_=IcePop", "low=0.5", "high=half"], "correction.high='half' must be a number"),
        (["_target_=IcePop", "low=2", "high=5"], "correction.low=2 must lie in (0, 1]"),
        (["_target_=SequenceMask", "low=0.999", "high=0.999"], "correction.high=0.999 must be a finite number >= 1"),
    ],
)
def test_corrections_are_checked_before_anything_starts(tmp_path: Path, changes: list[str], message: str) -> None:
    overrides = [f"correction.{change}".replace("_target_=", f"_target_={ALGOS}.mismatch.") for change in changes]
    assert refusal(tmp_path, *overrides).startswith(message)


class Own:
    """A strategy from outside of the package, with an annotation that only a type checker can read."""

    def __init__(self, *, size: int, other: "Unimported" = None, **_more: Any) -> None:  # type: ignore # noqa: F821
        self.size = size


def test_a_class_that_takes_any_name_is_left_to_itself() -> None:
    check = {"advantage": {"_target_": f"{__name__}.Own", "size": 1, "anything": 2}}
    with pytest.raises(KeyError, match="data"):  # every argument passed; only then the missing nodes are looked for
        check_nodes(check)
    with pytest.raises(ConfigError, match=r"^advantage\.size is missing"):
        check_nodes({"advantage": {"_target_": f"{__name__}.Own", "anything": 2}})


def with_source(directory: Path, source: dict[str, Any]) -> str:
    """The refusal of settings with another source of tasks."""
    values = OmegaConf.to_container(composed(directory), resolve=True)
    assert isinstance(values, dict)
    with pytest.raises(ConfigError) as caught:
        check_nodes({**values, "data": {**values["data"], "source": source}})
    return str(caught.value)


def test_faults_of_data_are_found_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"q": "1+1?", "a": "2"}\nno json\n')
    rows = {"_target_": "spark_megatron.data.rows.Files", "paths": [str(path)]}
    source = {
        "_target_": "spark_megatron.data.table.TableSource",
        "rows": rows,
        "question_field": "q",
        "answer_field": "a",
        "answer_after": None,
        "instruction": None,
        "system": None,
        "verifier": "math",
        "max_broken": 0,
    }
    assert with_source(tmp_path, source).startswith(f"data.source: {path}:2: not JSON")
    missing = {**source, "rows": {**rows, "paths": "nowhere.jsonl"}}
    assert with_source(tmp_path, missing) == (
        "data.source.rows.paths='nowhere.jsonl': there is no such file or directory"
    )
    mistyped = {**source, "rows": {**rows, "split_": "train"}}
    assert "data.source.rows.split_=train" in with_source(tmp_path, mistyped)
    other = {**source, "rows": {**rows, "paths": str(tmp_path)}}
    assert with_source(tmp_path, other).startswith(
        f"data.source.rows.paths={tmp_path}: was not written by save_to_disk"
    )
    both = {"_target_": "spark_megatron.data.mixture.MixtureSource", "weights": None, "sources": {"one": source}}
    assert f"{path}:2: not JSON" in with_source(tmp_path, both)
