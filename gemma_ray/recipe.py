"""The recipe: one YAML file that says everything a run needs, checked before anything starts.

    model   data   lora   train   mesh   cluster   convert   serve   eval   bench   cost   run

Each section is a pydantic model owned by the package that uses it. Unknown keys are refused with the nearest known one;
`--set section.key=value` overrides any key, the value read as YAML. The recipe as resolved, every default filled in, is written into
the run.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from gemma_ray.artifacts import write_text
from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.data.config import DataConfig
from gemma_ray.errors import RecipeError
from gemma_ray.evaluation.config import EvalConfig
from gemma_ray.models.config import ModelSection
from gemma_ray.planning.config import PlanConfig
from gemma_ray.reporting.config import CostConfig
from gemma_ray.section import Section
from gemma_ray.serving.config import ServeConfig
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig


class RunConfig(Section):
    """Where artifacts go."""

    dir: str = "runs/default"
    cache_dir: str | None = Field(
        default=None, description="base weights and data that several runs share; null = gemma-ray in $XDG_CACHE_HOME or ~/.cache"
    )

    @field_validator("dir", "cache_dir")
    @classmethod
    def _local(cls, folder: str | None) -> str | None:
        if folder is None:
            return None
        if "://" in folder:
            raise ValueError("artifacts are renamed into place, which only a file system does; name a local or mounted folder")
        if "\0" in folder or not folder.strip():
            raise ValueError("not a folder's name")
        try:
            Path(folder).expanduser()
        except RuntimeError as e:
            raise ValueError("no such user; name a folder") from e
        return folder

    @property
    def path(self) -> Path:
        return Path(self.dir).expanduser()

    @property
    def cache_path(self) -> Path:
        return (Path(self.cache_dir) if self.cache_dir else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gemma-ray").expanduser()


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
    slices: int = Field(
        default=1, ge=1, le=1024, description="TPU slices of that topology; the mesh covers one, the others hold copies of it"
    )
    emulate: bool = Field(default=False, description="bring the slice up on this machine's CPU, and take it down again")
    spare_slices: int = Field(default=0, ge=0, le=64, description="emulated: further slices (hosts, off TPU) to move to when one is lost")
    min_slices: int | None = Field(
        default=None, ge=1, description="TPU: after a loss, training goes on with no fewer slices; null = with all of them only"
    )
    min_hosts: int | None = Field(
        default=None, ge=1, description="the same for hosts, where there is no topology; `mesh.fsdp` shrinks with them"
    )
    wait_s: float = Field(default=60.0, ge=0, description="after a loss, how long a slice or spare is waited for")
    start_s: float | None = Field(
        default=3600.0, gt=0, description="training that has not reported its first step by then is started again; null = no limit"
    )
    stall_s: float | None = Field(
        default=1800.0, gt=0, description="training that has not reported for so long is started again; null = no limit"
    )
    save_s: float = Field(default=120.0, ge=0, description="how long workers have to save on SIGTERM or a preemption notice")
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
    plan: PlanConfig = PlanConfig()
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


Key = tuple[str, ...]
"""Where a value stands in a recipe, such as ("train", "steps")."""


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by name, and apply `section.key=value` overrides.

    Raises RecipeError for a missing file, YAML that does not parse, a key that is written twice or unknown (naming the nearest known one),
    or a value that does not fit; with the line, or the override, that it comes from.
    """
    path = Path(name_or_path)
    if not path.exists() and name_or_path in shipped_recipes():
        path = SHIPPED / f"{name_or_path}.yaml"
    if not path.is_file():
        raise RecipeError(f"no recipe file '{name_or_path}'. Shipped recipes: {', '.join(shipped_recipes())}")
    try:
        text = path.read_text(encoding="utf-8")
        raw, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: bytes that are not UTF-8, or a date that does not exist
        raise RecipeError(f"{path}: not valid YAML: {e}") from e
    except OSError as e:
        raise RecipeError(f"{path}: cannot be read: {e.strerror}") from e
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, not a {type(raw).__name__}")
    origins = {key: f"{path}:{line}" for key, line in _key_lines(tree, path).items()}
    for override in overrides:
        key = _apply_override(raw, override)
        origins |= {key[:n]: f"--set '{override}'" for n in range(1, len(key) + 1) if n == len(key) or key[:n] not in origins}
    return parse_recipe(raw, str(path), origins)


def parse_recipe(raw: dict[str, Any], origin: str = "recipe", origins: Mapping[Key, str] | None = None) -> Recipe:
    """Check a mapping of sections; a section that is empty takes its defaults.

    Raises RecipeError naming the key, the value, where it comes from (`origins` by key, else `origin`) and the remedy.
    """
    filled = {key: {} if value is None and key in Recipe.model_fields else value for key, value in raw.items()}
    try:
        return Recipe.model_validate(filled)
    except ValidationError as e:
        raise RecipeError("\n".join(_explain(origin, origins or {}, error) for error in e.errors())) from e


def _key_lines(node: yaml.Node | None, path: Path, prefix: Key = ()) -> dict[Key, int]:
    """The line of every key. Raises RecipeError for one that is written twice, of which YAML would silently keep the last."""
    lines: dict[Key, int] = {}
    if not isinstance(node, yaml.MappingNode) or len(prefix) > 4:  # an alias may point at a mapping that it stands in
        return lines
    for name, value in node.value:
        key, line = (*prefix, str(name.value)), name.start_mark.line + 1
        if key in lines:
            raise RecipeError(f"{path}:{line}: '{'.'.join(key)}' is already set in line {lines[key]}; keep one of them")
        lines[key] = line
        lines |= _key_lines(value, path, key)
    return lines


def _apply_override(raw: dict[str, Any], override: str) -> Key:
    name, equals, text = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or len(key) < 2 or not all(key):
        raise RecipeError(f"--set '{override}': write section.key=value, for example train.steps=100")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise RecipeError(f"--set '{override}': the value is not valid YAML: {e}") from e
    node = raw
    for part in key[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"--set '{override}': {part} is not a section")
        node = child
    node[key[-1]] = value
    return key


# What pydantic says in its own terms, in the recipe's.
_IN_RECIPE_TERMS = {
    "model_type": "a section is a mapping of keys",
    "tuple_type": "write a list, for example [1, 2]",
    "string_type": "text is wanted; put it in quotes",
}


def _explain(origin: str, origins: Mapping[Key, str], error: Any) -> str:
    location = tuple(str(part) for part in error["loc"])
    nearest = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in origins), None)
    origin = origin if nearest is None else origins[nearest]
    of_several_keys = isinstance(error["input"], Mapping)
    if of_several_keys:
        overrides = dict.fromkeys(o for key, o in origins.items() if key[: len(location)] == location and o.startswith("--set"))
        origin = ", ".join(overrides) or origin
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown key '{'.'.join(location)}'.{_suggestion(location)}"
    message: str = _IN_RECIPE_TERMS.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    shown = "" if of_several_keys else f" = {error['input']!r}"
    return f"{origin}: {'.'.join(location)}{shown}: {message[0].lower()}{message[1:]}"


def _suggestion(location: Key) -> str:
    """Name the known key nearest to an unknown one: the same name in another section, then a like name in its own, then anywhere."""
    *section, key = location
    known = _known_keys(Recipe)
    siblings = [k for k in known if k.split(".")[:-1] == section]
    by_last = {k.split(".")[-1]: k for k in sorted(known, key=lambda k: -k.count("."))}
    near = [by_last[key]] if key in by_last else difflib.get_close_matches(".".join(location), siblings, n=1, cutoff=0.6)
    if not near:
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
