from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from spark_megatron.checks import parse
from spark_megatron.config import Config
from spark_megatron.schema import ConfigError, nearest, setting_names, shown
from tests.settings import save_shape, typed


def refusal(directory: Path, *overrides: str) -> str:
    """The one line with which the settings are refused."""
    with pytest.raises(ConfigError) as caught:
        typed(directory, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_settings_arrive_with_their_types(tmp_path: Path) -> None:
    config = typed(tmp_path, "optim.lr=1", "trainer.total_steps=7", "objective.status_rewards.timeout=null")
    assert isinstance(config, Config)
    assert (config.optim.lr, type(config.optim.lr)) == (1.0, float)
    assert (config.trainer.total_steps, type(config.trainer.total_steps)) == (7, int)
    assert config.optim.betas == (0.9, 0.95)
    assert config.objective.status_rewards.timeout is None
    assert config.objective.pointwise.mode == "rl"
    assert config.eval.max_new_tokens == config.rollout.max_new_tokens
    assert config.advantage["_target_"] == "spark_megatron.algos.advantages.ZScore"


UNKNOWN = {
    "+trainer.totl_steps=5": "trainer.totl_steps=5: there is no setting trainer.totl_steps; "
    "did you mean trainer.total_steps?",
    "++optim.bettas=[1,2]": "optim.bettas=[1, 2]: there is no setting optim.bettas; did you mean optim.betas?",
    "+objective.pointwise.mod=rl": "objective.pointwise.mod=rl: there is no setting objective.pointwise.mod; "
    "did you mean objective.pointwise.mode?",
    "+lr=1": "lr=1: there is no setting lr; did you mean optim.lr?",
    "+trainer.lr=1": "trainer.lr=1: there is no setting trainer.lr; did you mean optim.lr?",
    "+optimm.lr=1": "optimm.lr=1: there is no setting optimm.lr; did you mean optim.lr?",
    "+kl_shedule=cosine": "kl_shedule=cosine: there is no setting kl_shedule; did you mean kl_schedule?",
}


@pytest.mark.parametrize(("override", "message"), UNKNOWN.items(), ids=UNKNOWN)
def test_an_added_name_that_does_not_exist(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override) == message


def test_a_name_like_no_other_gets_the_names_beside_it(tmp_path: Path) -> None:
    start = "new.key=1: there is no setting new.key; valid are advantage, assistant, checkpoint, correction, "
    assert refusal(tmp_path, "+new.key=1").startswith(start)
    message = refusal(tmp_path, "+model.qqqqqqqqqqqq=1")
    assert message == (
        "model.qqqqqqqqqqqq=1: there is no setting model.qqqqqqqqqqqq; valid are model.dtype, model.path"
    )


MISSING = {
    "trainer.total_steps=???": "trainer.total_steps",
    "~trainer.total_steps": "trainer.total_steps",
    "~objective.pointwise.mode": "objective.pointwise.mode",
    "~optim.betas": "optim.betas",
    "~seed": "seed",
}


@pytest.mark.parametrize(("override", "name"), MISSING.items(), ids=MISSING)
def test_a_missing_value(tmp_path: Path, override: str, name: str) -> None:
    assert refusal(tmp_path, override) == f"{name} is missing: give it a value, {name}=..."


WRONG = {
    "trainer.total_steps=abc": "trainer.total_steps='abc' must be a whole number",
    "trainer.total_steps='5'": "trainer.total_steps='5' must be a whole number",
    "trainer.total_steps=1.5": "trainer.total_steps=1.5 must be a whole number",
    "trainer.total_steps=true": "trainer.total_steps=true must be a whole number",
    "trainer.total_steps=null": "trainer.total_steps=null must be a whole number",
    "optim.lr=abc": "optim.lr='abc' must be a number",
    "optim.lr=true": "optim.lr=true must be a number",
    "objective.pool_size=many": "objective.pool_size='many' must be a whole number",
    "objective.status_rewards.timeout=never": "objective.status_rewards.timeout='never' must be a number",
    "name=5": "name=5 must be a text",
    "optim.betas=[0.9]": "optim.betas=[0.9] must be a list of 2 values",
    "optim.betas=[0.9,high]": "optim.betas[1]='high' must be a number",
    "optim.decay=cosin": "optim.decay=cosin is not a choice; did you mean cosine?",
    "model.dtype=fp8": "model.dtype=fp8 is not a choice; valid are bf16, fp32",
    "objective.pairwise.mode=supervise": "objective.pairwise.mode=supervise is not a choice; did you mean supervised?",
    "trainer.loop=5": "trainer.loop=5 must be a mapping (a node with _target_)",
    "objective.pointwise=rl": "objective.pointwise=rl must be a group of settings, such as objective.pointwise.mode",
    "name=${nope}": "name: Interpolation key 'nope' not found",
    "~recycle.bank": "demonstrations.bank: Interpolation key 'recycle.bank' not found",
}


@pytest.mark.parametrize(("override", "message"), WRONG.items(), ids=WRONG)
def test_a_value_of_another_type(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override) == message


OUT_OF_RANGE = {
    "rollout.samples_per_task=1": "rollout.samples_per_task=1: a group needs at least 2 rollouts, or every "
    "advantage is 0",
    "data.max_prompt_tokens=0": "data.max_prompt_tokens=0 must be greater than 0, or null",
    "data.heldout={}": "data.heldout_share=0.3 with data.heldout: the held-out tasks come from there; set the share to "
    "0, or data.heldout to null",
    "data.overlong=cuts": "data.overlong=cuts is not a choice; did you mean cut?",
    "data.heldout_share=0": "data.heldout_share=0.0 must lie between 0 and 1",
    "data.heldout_share=1": "data.heldout_share=1.0 must lie between 0 and 1",
    "data.heldout_share=nan": "data.heldout_share=nan must lie between 0 and 1",
    "trainer.total_steps=0": "trainer.total_steps=0 must be greater than 0",
    "trainer.total_steps=-1": "trainer.total_steps=-1 must be a finite number, 0 or more",
    "optim.lr=nan": "optim.lr=nan must be a finite number, 0 or more",
    "optim.lr=inf": "optim.lr=inf must be a finite number, 0 or more",
    "optim.betas=[0.9,1.0]": "optim.betas[1]=1.0 must lie in [0, 1)",
    "optim.decay_updates=0": "optim.decay_updates=0 must be greater than 0, or null",
    "trainer.eval_every=-1": "trainer.eval_every=-1 must be a finite number, 0 or more",
    "checkpoint.every=-1": "checkpoint.every=-1 must be a finite number, 0 or more",
    "objective.max_staleness=-1": "objective.max_staleness=-1 must be a finite number, 0 or more",
    "rollout.temperature=0": "rollout.temperature=0.0 must be greater than 0",
    "rollout.temperature=-0.5": "rollout.temperature=-0.5 must be a finite number, 0 or more",
    "checkpoint.keep=0": "checkpoint.keep=0 must be greater than 0",
    "reward_model.rule_share=1.1": "reward_model.rule_share=1.1 must lie in [0, 1]",
    "reward_model.tries=0": "reward_model.tries=0 must be greater than 0",
    "reward_model.anchor=-1": "reward_model.anchor=-1.0 must be a finite number, 0 or more",
    "reward_model.monitor.drop=-1": "reward_model.monitor.drop=-1.0 must be a finite number, 0 or more",
    "reward_model.optim.lr=0": "reward_model.optim.lr=0.0 must be greater than 0",
    "reward_model.optim.betas=[1,0]": "reward_model.optim.betas[0]=1.0 must lie in [0, 1)",
}


@pytest.mark.parametrize(("override", "message"), OUT_OF_RANGE.items(), ids=OUT_OF_RANGE)
def test_a_value_out_of_range(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override) == message


CONTRADICTIONS = {
    "optim.lr=1e-4 optim.min_lr=1e-3": "optim.min_lr=0.001 is greater than optim.lr=0.0001",
    "reward_model.optim.min_lr=1": "reward_model.optim.min_lr=1.0 is greater than reward_model.optim.lr=1e-05",
    "optim.decay=wsd": "optim.wsd_updates=0 with optim.decay=wsd: the number of last updates over which the rate falls "
    "must be above 0 with wsd, and 0 without",
    "optim.wsd_updates=3": "optim.wsd_updates=3 with optim.decay=constant: the number of last updates over which the "
    "rate falls must be above 0 with wsd, and 0 without",
    "optim.decay=wsd optim.wsd_updates=9 optim.decay_updates=8": "optim.wsd_updates=9 is greater than "
    "optim.decay_updates=8",
    "parallel.tensor=1 parallel.ranks=3 trainer.tasks_per_step=64": "parallel.ranks=3 does not divide "
    "trainer.tasks_per_step=64: choose values that divide",
    "trainer.tasks_per_step=64 objective.pool_size=63": "objective.pool_size=63 is smaller than "
    "trainer.tasks_per_step=64: the pool could never fill a reward period",
    "recycle.judge_verifier=choise": "recycle.judge_verifier=choise is no key of verifiers; did you mean choice?",
    "data.source.verifier=latex": "data.source.verifier=latex is no key of verifiers; valid are choice, math",
    "demonstrations.judge_verifier=coice": "demonstrations.judge_verifier=coice is no key of verifiers; "
    "did you mean choice?",
}


@pytest.mark.parametrize(("overrides", "message"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_contradictions_name_both_sides(tmp_path: Path, overrides: str, message: str) -> None:
    assert refusal(tmp_path, *overrides.split()) == message


@pytest.mark.parametrize(
    ("overrides", "shape", "message"),
    [
        (
            "parallel.ranks=3 parallel.tensor=2 trainer.tasks_per_step=3",
            {},
            "parallel.tensor=2 * parallel.pipeline=1 * parallel.context=1 does not divide parallel.ranks=3: choose "
            "degrees whose product does (model.path={folder})",
        ),
        (
            "parallel.tensor=2",
            {"num_attention_heads": 3},
            "parallel.tensor=2 does not divide the model's 3 attention heads: choose a degree that does "
            "(model.path={folder})",
        ),
        (
            "parallel.virtual=2",
            {},
            "parallel.virtual=2 needs pipeline stages, but parallel.pipeline=1: set one of them (model.path={folder})",
        ),
        (
            "seed=0",
            {"model_type": "gpt2"},
            "model.path={folder}: {file} has model_type=gpt2; supported are llama, qwen2, qwen3, qwen3_moe",
        ),
        (
            "rollout.max_new_tokens=30",
            {"max_position_embeddings": 30},
            "rollout.max_new_tokens=30 leaves no room for a prompt: the model takes 30 tokens "
            "(max_position_embeddings of {file})",
        ),
        (
            "seed=0",
            {"num_hidden_layers": None},
            "model.path={folder}: {file} has no num_hidden_layers: give a Hugging Face model directory",
        ),
    ],
)
def test_the_model_must_fit(tmp_path: Path, overrides: str, shape: dict[str, Any], message: str) -> None:
    folder = save_shape(tmp_path / "other", **shape)
    said = refusal(tmp_path, *overrides.split(), f"model.path={folder}")
    assert said == message.format(folder=folder, file=folder / "config.json")


def test_a_model_without_grouped_heads_has_one_per_head(tmp_path: Path) -> None:
    folder = save_shape(tmp_path / "other", num_key_value_heads=None)
    assert typed(tmp_path, f"model.path={folder}", "parallel.tensor=2").parallel.tensor == 2


COOPER = "trainer.loop={_target_: spark_megatron.trainers.cooper.train}"


def test_a_reward_model_must_fit_where_one_is_used(tmp_path: Path) -> None:
    """The layout, and a directory that is there; nobody looks at it where the loop has none."""
    wide = save_shape(tmp_path / "wide", num_attention_heads=3, num_key_value_heads=3)
    for path, told in ((wide, "does not divide the model's 3 attention heads"), (tmp_path, "is not a model directory")):
        override = f"reward_model.path={path}"
        message = refusal(tmp_path, COOPER, override)
        assert told in message
        assert override in message
        assert not typed(tmp_path, override).scored


def test_a_policy_must_sample(tmp_path: Path) -> None:
    scorer = save_shape(tmp_path / "scorer", architectures=["Qwen2ForSequenceClassification"])
    assert refusal(tmp_path, f"model.path={scorer}") == (
        f"model.path={scorer} has a scalar head and samples nothing: give a language model"
    )
    assert typed(tmp_path, COOPER, f"reward_model.path={scorer}").scored


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    message = refusal(tmp_path, f"model.path={tmp_path}")
    assert message.startswith(f"model.path={tmp_path}")
    assert str(tmp_path / "config.json") in message


def test_a_group_that_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match=r"^model=5 must be a group of settings, such as model\.path$"):
        parse(OmegaConf.create(dict.fromkeys(Config.__dataclass_fields__, "x") | {"seed": 0, "model": 5}))


def test_nearest_names() -> None:
    valid = ["seed", "optim", "optim.lr", "optim.min_lr", "eval", "eval.items"]
    assert nearest("optim.lrr", valid) == "; did you mean optim.lr?"
    assert nearest("lr", valid) == "; did you mean optim.lr?"
    assert nearest("optim.lr.x", valid) == "; did you mean optim.min_lr?"
    assert nearest("eval.qqqq", valid) == "; valid are eval.items"
    assert nearest("zzz", valid) == "; valid are eval, optim, seed"


def test_all_names_of_settings() -> None:
    names = list(setting_names(Config))
    assert len(names) == len(set(names))
    assert {"seed", "optim", "optim.lr", "objective.pointwise.mode", "trainer.loop"} <= set(names)


def test_values_are_shown_as_in_yaml_and_on_a_line() -> None:
    assert [shown(value) for value in (None, True, 1.5, "text", [1, 2])] == ["null", "true", "1.5", "text", "[1, 2]"]
    assert shown("x" * 200) == "x" * 77 + "..."


def test_prompts_and_responses_must_fit_the_model_together(tmp_path: Path) -> None:
    assert typed(tmp_path, "data.max_prompt_tokens=448", "rollout.max_new_tokens=64").data.max_prompt_tokens == 448
    message = refusal(tmp_path, "data.max_prompt_tokens=449", "rollout.max_new_tokens=64")
    assert message.startswith("data.max_prompt_tokens=449 and rollout.max_new_tokens=64 are more than the 512 tokens")


def test_verifiers_of_sources_inside_of_others_are_checked(tmp_path: Path) -> None:
    inner = (
        "data.source={_target_: x, sources: {one: {_target_: y, verifier: math}, two: {_target_: y, verifier: maths}}}"
    )
    assert refusal(tmp_path, inner.replace(": ", ":")) == (
        "data.source.sources.two.verifier=maths is no key of verifiers; did you mean math?"
    )
