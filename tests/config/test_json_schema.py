"""The JSON Schemas that editors are given accept every file of conf/, and mark what the programs would refuse."""

import json

import jsonschema
import pytest
import yaml
from omegaconf import OmegaConf

from simbal.cli import schema
from simbal.config.json_schema import ROOT, schemas
from simbal.config.schema import every_key
from simbal.cost.hardware import Hardware
from tests.conftest import CONF

SCHEMAS = schemas({"hardware": Hardware})
OTHER_ROOTS = {"evaluate", "export", "prepare"}  # their keys have no types
GROUPS = sorted({file.parent.name for file in CONF.glob("*/*.yaml")} - {"scale"})  # which are studies, not settings
FILES = [CONF / "config.yaml", *(file for group in GROUPS for file in sorted((CONF / group).glob("*.yaml")))]


def content(file):
    return OmegaConf.to_container(OmegaConf.load(file))  # as Hydra reads it: 1e-3 is a number


def schema_of(file):
    return SCHEMAS[ROOT if file.parent.name in ("conf", "sweeps") else file.parent.name]


@pytest.mark.parametrize("file", FILES, ids=[f"{file.parent.name}/{file.stem}" for file in FILES])
def test_every_config_is_valid(file):
    jsonschema.validate(content(file), schema_of(file))


def test_every_group_has_a_schema_and_every_root_of_runs():
    assert {*SCHEMAS} == {ROOT, *GROUPS} - {"sweeps"}
    assert {file.stem for file in CONF.glob("*.yaml")} == {"config", *OTHER_ROOTS}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one(name):
    jsonschema.Draft7Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("model", "num_layer: 3"), ("model", "num_layers: 0"), ("model", "num_layers: 2.5"), ("model", "bias: 1"),
        ("model", "rope_theta: 0"), ("router", "gating: tanh"), ("data", "source: disk"), ("data", "threads: x"),
        ("data", "last_shard: 3"), ("data", "validation_shard: 5000"), ("optim", "betas: [a, b]"),
        ("trainer", "max_steps: many"), ("logger", "kind: file"), ("balancing", "mine: 3"), ("hardware", "price: 3"),
        ("balancing", "mine: {coef: -1}"), ("analysis", "quality: [1]"), (ROOT, "sed: 1"), (ROOT, "until: done"),
        (ROOT, "trainer: {max_step: 3}"), (ROOT, "model: {num_layers: 0}"), (ROOT, "name: 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_marked(group, text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), SCHEMAS[group])


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("model", "num_layers: ${other}"), ("data", "threads: null"), ("data", "threads: 4"), ("data", "files: ???"),
        ("data", "packages: {numpy: '2.0'}"), ("optim", "lr: 1"), ("model", "defaults: [tiny, _self_]"),
        ("balancing", "mine: {_target_: a.B, strength: 3}"), (ROOT, "columns: [ppl]"), (ROOT, "hydra: {sweeper: {}}"),
        (ROOT, "balancing: {lbl: {coef: 0.1}}"), (ROOT, "defaults: [config, {override balancing: mine}]"),
    ],
)  # fmt: skip
def test_what_is_right_is_not_marked(group, text):
    jsonschema.validate(yaml.safe_load(text), SCHEMAS[group])


def test_an_editor_can_say_what_each_key_means():
    said = json.dumps(SCHEMAS, ensure_ascii=False)
    assert [name for name, _, key in every_key() if json.dumps(key.meaning, ensure_ascii=False) not in said] == []


def test_the_files_are_written_and_the_editor_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    schema.main(["there/schema"])
    first, _, settings = capsys.readouterr().out.partition("\n")
    assert first.startswith("written: there/schema. ")
    named = json.loads(settings)["yaml.schemas"]
    assert named["there/schema/model.schema.json"] == ["conf/model/*.yaml"]
    assert named["there/schema/config.schema.json"] == ["conf/config.yaml", "sweeps/*.yaml", "conf/sweeps/*.yaml"]
    assert {file: json.loads((tmp_path / file).read_text()) for file in named} == {
        f"there/schema/{name}.schema.json": made for name, made in SCHEMAS.items()
    }


def test_a_file_in_the_place_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "schema").write_text("")
    with pytest.raises(SystemExit, match="schema cannot be written: File exists"):
        schema.main([str(tmp_path / "schema")])
