import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from spark_megatron.cli.compose import compose_config, groups, load
from spark_megatron.cli.run_dir import prepare
from spark_megatron.config import Config
from spark_megatron.paths import conf_dir
from spark_megatron.schema import ConfigError
from tests.settings import save_shape

FILES = [
    (folder.name, file.stem)
    for folder in sorted(conf_dir().iterdir())
    if folder.is_dir()
    for file in sorted(folder.glob("*.yaml"))
]
CHOICES = [(group, choice) for group, choice in FILES if group in groups()]


@pytest.fixture
def shape(tmp_path: Path) -> str:
    return f"model.path={save_shape(tmp_path / 'shape')}"


def refusal(*overrides: str) -> str:
    """The one line with which the overrides are refused."""
    with pytest.raises(ConfigError) as caught:
        compose_config(list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def needed(group: str, choice: str, directory: Path) -> list[str]:
    """What a file leaves to the user, and in place of the hub a directory."""
    if group != "data" or choice not in ("files", "hub"):
        return []
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text(json.dumps({"question": f"{split}?", "answer": "#### 1"}) + "\n")
    if choice == "files":
        return [f"data.source.rows.paths={directory}/train.jsonl"]
    local = {"name": directory, "subset": "null"}
    return [f"data.{side}.rows.{key}={value}" for side in ("source", "heldout") for key, value in local.items()]


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{g}={c}" for g, c in CHOICES])
def test_every_file_of_every_group_can_be_chosen(group: str, choice: str, shape: str, tmp_path: Path) -> None:
    composed = compose_config([f"{group}={choice}", shape])
    config = load([f"{group}={choice}", shape, *needed(group, choice, tmp_path)])[1]
    assert isinstance(config, Config)
    if group == "experiment":
        assert config.name == choice
        return
    # What the file itself says is what arrives (but for the model's path, given above).
    text = (conf_dir() / group / f"{choice}.yaml").read_text()
    said = yaml.safe_load(text)
    said.pop("defaults", None)
    said.pop("path", None)
    place = composed if text.startswith("# @package _global_") else composed[group]
    assert OmegaConf.merge(place, OmegaConf.create(said)) == place


def test_every_group_has_a_default_and_every_file_is_in_a_group() -> None:
    found = set()
    for root in ("config", "evaluate"):
        defaults = yaml.safe_load((conf_dir() / f"{root}.yaml").read_text())["defaults"]
        named = {group for entry in defaults if isinstance(entry, dict) for group in entry}
        assert named == set(groups(root))
        found |= {(group, choice) for group, names in groups(root).items() for choice in names}
    assert found == set(FILES)
    others = {file for file in conf_dir().rglob("*.yaml") if file.parent.parent != conf_dir()}
    assert others == {conf_dir() / "config.yaml", conf_dir() / "evaluate.yaml"}


def test_an_experiment_yields_to_the_command_line(shape: str) -> None:
    _, config = load(["experiment=sft_tiny", "optim.lr=0.5", "trainer=spark", "kl_schedule=cosine", shape])
    assert config.name == "sft_tiny"
    assert config.optim.lr == 0.5
    assert config.optim.decay == "cosine"
    assert config.trainer.loop["_target_"] == "spark_megatron.trainers.spark.train"
    assert config.kl_schedule["_target_"].endswith("Cosine")


TRAINERS = ", ".join(sorted(file.stem for file in Path(__file__).parents[2].joinpath("conf/trainer").glob("*.yaml")))

REFUSED = {
    "trainer.totl_steps=5": "trainer.totl_steps=5: there is no setting trainer.totl_steps; "
    "did you mean trainer.total_steps?",
    "total_steps=5": "total_steps=5: there is no setting total_steps; did you mean trainer.total_steps?",
    "lr=1": "lr=1: there is no setting lr; did you mean optim.lr?",
    "advantage.epss=1": "advantage.epss=1: there is no setting advantage.epss; did you mean advantage.eps?",
    "data.source.parms.max_terms=3": "data.source.parms.max_terms=3: there is no setting "
    "data.source.parms.max_terms; did you mean data.source.params.max_terms?",
    "~trainer.totl_steps": "~trainer.totl_steps: there is no setting trainer.totl_steps; "
    "did you mean trainer.total_steps?",
    "kl_shedule=cosine": "kl_shedule=cosine: there is no setting kl_shedule; did you mean kl_schedule?",
    "kl_schedule=cosin": "kl_schedule=cosin does not exist; did you mean cosine?",
    "experiment=spark_tinyy": "experiment=spark_tinyy does not exist; did you mean spark_tiny?",
    "+experiment=spark_tiny": "+experiment=spark_tiny: experiment is there already; write experiment=spark_tiny",
    "trainer=5": f"trainer=5 does not exist; valid are {TRAINERS}",
    "trainer=null": f"trainer=null does not exist; valid are {TRAINERS}",
    "parallel=[tp2,pp2]": "parallel=[tp2,pp2] does not exist; valid are dp2, pp2, single, tp2",
    "~kl_schedule": "~kl_schedule: kl_schedule cannot be left out; "
    "valid are adaptive, constant, cosine, linear, warmup",
    "kl_schedule=constant,cosine": "kl_schedule=constant,cosine: give one value; "
    "a comma in a text needs quotes around it, '\"a,b\"'",
    "seed=1,2": "seed=1,2: give one value; a comma in a text needs quotes around it, '\"a,b\"'",
    "seed": "seed: cannot be read; write name=value, with quotes around special signs",
    "name=${seed": "name=${seed: cannot be read; write name=value, with quotes around special signs",
    "=5": "=5: a value needs a name before it, name=value",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=REFUSED)
def test_overrides_that_name_nothing(override: str, message: str) -> None:
    assert refusal(override) == message


def test_the_nearest_name_is_sought_among_the_chosen_groups() -> None:
    message = "kl_schedule.strt=1: there is no setting kl_schedule.strt; did you mean kl_schedule.start?"
    assert refusal("kl_schedule=cosine", "kl_schedule.strt=1") == message
    message = (
        "kl_schedule.strt=1: there is no setting kl_schedule.strt; valid are kl_schedule._target_, kl_schedule.value"
    )
    assert refusal("kl_schedule.strt=1") == message


def test_overrides_are_read_before_anything_is_composed(shape: str) -> None:
    assert refusal("experiment=sft_tiny", shape, "kl_schedule=cosin").startswith("kl_schedule=cosin does not exist")


def test_resolved_settings_compose_again(tmp_path: Path, shape: str) -> None:
    composed, config = load([shape, "seed=3", f"run_dir={tmp_path}"])
    prepare(tmp_path, composed, 0)
    path = tmp_path / "config.yaml"
    written = yaml.safe_load(path.read_text())
    assert written["seed"] == 3
    assert written["eval"]["max_new_tokens"] == config.rollout.max_new_tokens
    assert "$" not in path.read_text()
    assert written == OmegaConf.to_container(composed, resolve=True)
