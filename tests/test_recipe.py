"""A recipe is checked whole before anything starts, and an error says which key, where, and what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemma_ray.errors import RecipeError
from gemma_ray.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes


@pytest.fixture
def recipe_file(tmp_path: Path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def value(recipe: Recipe, key: str) -> Any:
    node: Any = recipe
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads(name: str):
    assert load_recipe(name).run.dir.startswith("runs/")


def test_the_quickstart_recipe_ships():
    assert "quickstart-cpu" in shipped_recipes()


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_resolved_recipe_is_the_same_recipe(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    recipe.write(tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe


def test_a_resolved_recipe_holds_every_default():
    resolved = yaml.safe_load(Recipe().to_yaml())
    assert set(resolved) == set(Recipe.model_fields)
    assert all(set(resolved[name]) == set(type(section).model_fields) for name, section in Recipe())


@pytest.mark.parametrize("text", ["[1, inf]", "[1, .inf]", "[1.0, .INF]"])
def test_an_unlimited_rate_survives_the_round_trip(recipe_file: Any, text: str):
    recipe = load_recipe(recipe_file(f"bench: {{qps: {text}}}"))
    assert recipe.bench.qps == (1.0, math.inf)
    assert parse_recipe(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.parametrize("text", ["", "# only a comment\n", "train:\nbench:\n", "train: {}\n"])
def test_what_is_left_empty_takes_its_defaults(recipe_file: Any, text: str):
    assert load_recipe(recipe_file(text)) == Recipe()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=5", 5),
        ("train.steps= 5 ", 5),
        ("train.learning_rate=1e-4", 1e-4),  # text to YAML 1.1, a number to us
        ("train.learning_rate=1e4", 1e4),
        ("cost.usd_per_hour=12", 12.0),
        ("train.clip_norm=null", None),
        ("lora.targets=[q_proj, o_proj]", ("q_proj", "o_proj")),
        ("bench.qps=[1, inf]", (1.0, math.inf)),
        ("run.dir=runs/a=b", "runs/a=b"),
        ("run.dir='012'", "012"),
        ("serve.engine.enforce_eager=true", True),
        ("model.pretrain.steps=3", 3),
    ],
)
def test_an_override_is_read_as_yaml(recipe_file: Any, override: str, expected: Any):
    recipe = load_recipe(recipe_file("train: {steps: 7, clip_norm: 1.0}"), [override])
    assert value(recipe, override.partition("=")[0]) == expected


def test_overrides_apply_in_order_and_over_the_file(recipe_file: Any):
    recipe = load_recipe(recipe_file("train: {steps: 7, seed: 3}"), ["train.steps=8", "train.steps=9"])
    assert (recipe.train.steps, recipe.train.seed) == (9, 3)


@pytest.mark.parametrize("override", ["train.steps", "steps=5", "=5", ".steps=5", "train.=5", "", "train"])
def test_an_override_of_another_shape_says_how_to_write_one(recipe_file: Any, override: str):
    with pytest.raises(RecipeError, match=r"write section\.key=value"):
        load_recipe(recipe_file(""), [override])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.steps=[1", "not valid YAML"),
        ("run.dir=2026-99-99", "not valid YAML"),  # PyYAML takes it for a date and raises a bare ValueError
        ("train.steps=many", r"train\.steps = 'many'"),
        ("train.steps.x=1", r"train\.steps"),
        ("train.stepz=1", r"Did you mean 'train\.steps'"),
        ("run.dir=0123", "put it in quotes"),  # octal to YAML 1.1
        ("bench.qps=4", "write a list"),
    ],
)
def test_a_bad_override_is_quoted(recipe_file: Any, override: str, complaint: str):
    with pytest.raises(RecipeError, match=complaint) as error:
        load_recipe(recipe_file(""), [override])
    assert str(error.value).startswith(f"--set '{override}': ")


def test_a_rule_between_keys_names_the_overrides_and_not_the_whole_section(recipe_file: Any):
    path = recipe_file("train: {batch_size: 8}")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, ["train.micro_batches=3", "lora.rank=2"])
    assert str(error.value) == "--set 'train.micro_batches=3': train: batch_size 8 is not a multiple of micro_batches 3"
    with pytest.raises(RecipeError, match=r"\.yaml:1: train: batch_size 8 is not"):
        load_recipe(recipe_file("train: {batch_size: 8, micro_batches: 3}"))


def test_an_override_below_a_value_that_is_no_section_is_refused(recipe_file: Any):
    with pytest.raises(RecipeError, match="train is not a section"):
        load_recipe(recipe_file("train: 3"), ["train.steps=4"])


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("trian: {steps: 1}", "trian", "train"),
        ("train: {stpes: 1}", "train.stpes", "train.steps"),
        ("lora: {ranks: 8}", "lora.ranks", "lora.rank"),
        ("train: {rank: 8}", "train.rank", "lora.rank"),
        ("model: {pretrain: {stps: 1}}", "model.pretrain.stps", "model.pretrain.steps"),
        ("max_seq_len: 10", "max_seq_len", "data.max_seq_len"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_is_named(recipe_file: Any, text: str, unknown: str, nearest: str):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file(text))
    assert f"unknown key '{unknown}'" in str(error.value)
    assert f"Did you mean '{nearest}'?" in str(error.value)


def test_an_unknown_key_like_no_other_lists_what_is_known(recipe_file: Any):
    with pytest.raises(RecipeError, match="Known here: rank, alpha, rslora, dropout, targets"):
        load_recipe(recipe_file("lora: {zzz: 1}"))


def test_an_error_names_file_line_key_and_value(recipe_file: Any):
    path = recipe_file("# comment\ntrain:\n  seed: 1\n  steps: 0\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value) == f"{path}:4: train.steps = 0: input should be greater than or equal to 1"


def test_every_error_is_reported_at_once(recipe_file: Any):
    path = recipe_file("train: {steps: 0}\nlora: {rank: -1}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert [line.split(" = ")[0] for line in str(error.value).splitlines()] == [f"{path}:2: lora.rank", f"{path}:1: train.steps"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {steps: many}", "train.steps"),
        ("train: {steps: 1.5}", "train.steps"),
        ("train: {steps: [1]}", "train.steps"),
        ("train: {learning_rate: .nan}", "train.learning_rate"),
        ("train: {remat: sometimes}", "train.remat"),
        ("lora: {targets: []}", "lora.targets"),
        ("lora: {targets: [q_prj]}", "lora.targets"),
        ("lora: {targets: [k_proj]}", "lora.targets"),
        ("lora: {alpha: 0}", "lora.alpha"),
        ("serve: {port: 65536}", "serve.port"),
        ("bench: {qps: []}", "bench.qps"),
        ("bench: {qps: [0]}", "bench.qps"),
        ("bench: {contexts: [-5]}", "bench.contexts"),
        ("eval: {rules: lenient}", "eval.rules"),
        ("run: {dir: 5}", "run.dir"),
        ("train: [1]", "train"),
        ("train: lora", "train"),
        ("1: 2", "1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(recipe_file: Any, text: str, key: str):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file(text))
    assert f": {key} = " in str(error.value) and ":1:" in str(error.value)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("train.steps=true", "write a whole number in digits"),
        ("train.steps=1e3", "write a whole number in digits"),
        ("lora.rank='8'", "write a whole number in digits"),
        ("bench.contexts=[512, true]", "write a whole number in digits"),
        ("cost.usd_per_hour=true", "write a number"),
        ("train.clip_norm='0.5'", "write a number"),
        ("bench.qps=['4']", "write a number"),
        ("cluster.emulate=1", "write true or false"),
        ("cluster.emulate='yes'", "write true or false"),
    ],
)
def test_a_value_of_another_kind_is_refused_not_converted(recipe_file: Any, override: str, remedy: str):
    with pytest.raises(RecipeError, match=remedy) as error:
        load_recipe(recipe_file(""), [override])
    assert f"{override.partition('=')[0]} = " in str(error.value)


@pytest.mark.parametrize("text", ["train: {steps: 3}\nlora: {rank: 4}\ntrain: {seed: 1}", "train:\n  steps: 3\n  steps: 4"])
def test_a_key_written_twice_is_refused(recipe_file: Any, text: str):
    with pytest.raises(RecipeError, match=r":3: 'train(\.steps)?' is already set in line [12]"):
        load_recipe(recipe_file(text))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- a\n- b\n", "a mapping of sections, not a list"),
        ("hello", "a mapping of sections, not a str"),
        ("train: [1", "not valid YAML"),
        ("train:\n\tsteps: 3", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        (b"\xff\xfe\x00train", "not valid YAML: 'utf-8' codec"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("a: &a [*a]", "unknown key 'a'"),
        ("train: &t {engine: *t}", "train.engine"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(recipe_file: Any, content: str | bytes, complaint: str):
    path = recipe_file(content)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value).startswith(path) and complaint in str(error.value)


def test_a_missing_recipe_names_those_that_ship(tmp_path: Path):
    for missing in ("no-such-recipe", str(tmp_path / "none.yaml"), str(tmp_path)):
        with pytest.raises(RecipeError, match=r"Shipped recipes: .*quickstart-cpu"):
            load_recipe(missing)


def test_a_recipe_does_not_change_after_it_was_checked():
    with pytest.raises(ValueError, match="frozen"):
        Recipe().train.steps = 3  # type: ignore[misc]
