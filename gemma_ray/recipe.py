"""The recipe: one YAML file that says everything a run needs, checked before anything starts.

    model   data   lora   train   mesh   cluster   convert   serve   eval   bench   cost   run

Each section is a pydantic model owned by the package that uses it. Unknown keys are refused with the nearest known one;
`--set section.key=value` overrides any key, the value read as YAML. The recipe as resolved, every default filled in, is written into
the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from gemma_ray.artifacts import write_text
from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.data.config import DataConfig
from gemma_ray.errors import RecipeError
from gemma_ray.evaluation.config import EvalConfig
from gemma_ray.models.config import ModelSection
from gemma_ray.reporting.config import CostConfig
from gemma_ray.section import Section
from gemma_ray.serving.config import ServeConfig
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig


class RunConfig(Section):
    """Where artifacts go."""

    dir: str = "runs/default"
    cache_dir: str = Field(default="~/.cache/gemma-ray", description="base weights and data that several runs share")

    @property
    def path(self) -> Path:
        return Path(self.dir).expanduser()

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()


class ClusterConfig(Section):
    """The hardware, as `raycluster.slices` reads it: an accelerator and a topology, real or emulated on this machine.

    `accelerator` is a row of `raycluster.slices.ACCELERATORS` (v5p, v6e, v5e, h100, cpu, ...).
    """

    accelerator: str = "cpu"
    topology: str | None = Field(default=None, description="TPU chips, such as 2x2x1; for gpu and cpu see `hosts`")
    hosts: int = Field(default=1, ge=1, description="nodes, for accelerators without a topology")
    devices_per_host: int | None = Field(
        default=None, ge=1, description="chips of a host that are used; null = the accelerator's own number"
    )
    emulate: bool = Field(default=False, description="bring the slice up on this machine's CPU, and take it down again")
    address: str | None = Field(default=None, description="a running Ray cluster; null = the one this process is in, or an emulated one")


class Recipe(Section):
    """A whole recipe."""

    model: ModelSection = ModelSection()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()
    convert: ConvertConfig = ConvertConfig()
    serve: ServeConfig = ServeConfig()
    eval: EvalConfig = EvalConfig()
    bench: BenchConfig = BenchConfig()
    cost: CostConfig = CostConfig()
    run: RunConfig = RunConfig()

    def to_yaml(self) -> str:
        """The recipe as YAML, every default filled in."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def write(self, path: Path) -> None:
        """Write `to_yaml` to a file, whole."""
        write_text(path, self.to_yaml())


SHIPPED = Path(__file__).resolve().parent.parent / "workloads" / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by name, and apply `section.key=value` overrides.

    Raises RecipeError for a missing file, YAML that does not parse, an unknown key (naming the nearest known one) or a value that does
    not fit.
    """
    path = Path(name_or_path)
    if not path.exists() and name_or_path in shipped_recipes():
        path = SHIPPED / f"{name_or_path}.yaml"
    if not path.is_file():
        raise RecipeError(f"no recipe file '{name_or_path}'. Shipped recipes: {', '.join(shipped_recipes())}")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise RecipeError(f"{path}: not valid YAML: {e}") from e
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, not a {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    return parse_recipe(raw, origin=str(path))


def parse_recipe(raw: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Check a mapping of sections. Raises RecipeError naming the key, the value and the remedy."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as e:
        raise RecipeError("\n".join(_explain(origin, error) for error in e.errors())) from e


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise RecipeError(f"--set '{override}': write section.key=value, for example train.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise RecipeError(f"--set '{override}': the value is not valid YAML: {e}") from e
    node = raw
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"--set '{override}': {part} is not a section")
        node = child
    node[parts[-1]] = value


def _explain(origin: str, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown key '{where}'.{_suggestion(error['loc'])}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{origin}: {where} = {error['input']!r}: {message[0].lower()}{message[1:]}"


def _suggestion(location: tuple[Any, ...]) -> str:
    """Name the known key nearest to an unknown one, in its own section first and then anywhere."""
    *section, key = [str(part) for part in location]
    known = _known_keys(Recipe)
    siblings = [k for k in known if k.split(".")[:-1] == section]
    near = difflib.get_close_matches(".".join([*section, key]), siblings, n=1, cutoff=0.6)
    if not near:
        by_last = {k.split(".")[-1]: k for k in known}
        near = [by_last[k] for k in difflib.get_close_matches(key, by_last, n=1, cutoff=0.7)]
    return f" Did you mean '{near[0]}'?" if near else f" Known here: {', '.join(k.split('.')[-1] for k in siblings)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys
