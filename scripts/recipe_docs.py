"""Writes docs/recipe.md from the recipe's models: `make docs`. tests/test_recipe_docs.py fails when the committed page is out of date."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gemma_ray.recipe import Recipe

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipe.md"

OPENING = """# The recipe

One YAML file says everything a run needs. This page is made from the pydantic models that check it (`make docs`).

- Unknown keys are refused, and the nearest known one is named. An error gives the file, the line, the key and the value.
- `--set section.key=value` overrides any key on every command; the value is read as YAML: `--set lora.targets=[q_proj,o_proj]`,
  `--set train.clip_norm=null`.
- The recipe as resolved, every default filled in, is kept in the run as `recipe.yaml`, and is itself a recipe.
- Units are in the names: `_s` seconds, `_bytes` bytes, `_usd` US dollars. Lengths are in tokens.
- Text that YAML would read as a number, a date or a truth value goes in quotes: `dir: "0123"`.
"""


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([OPENING, *(_section(name, field.annotation) for name, field in Recipe.model_fields.items())])


def _section(name: str, model: Any) -> str:
    about = " ".join((model.__doc__ or "").split())
    rows = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in _rows(model, ""))
    return f"## {name}\n\n{about}\n\n| key | type | default | |\n| --- | --- | --- | --- |\n{rows}\n"


def _rows(model: type[BaseModel], prefix: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += _rows(field.annotation, f"{prefix}{name}.")
        else:
            rows.append((f"`{prefix}{name}`", _type(field.annotation), f"`{_default(field)}`", _about(field)))
    return rows


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    return {type(None): "null", str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).removesuffix("...\n").strip()


def _about(field: FieldInfo) -> str:
    bounds = []
    for rule in field.metadata:
        for kind, sign in ((annotated_types.Ge, "≥"), (annotated_types.Gt, ">"), (annotated_types.Le, "≤"), (annotated_types.Lt, "<")):
            if isinstance(rule, kind):
                bounds.append(f"{sign} {getattr(rule, kind.__name__.lower())}")
    return "; ".join(filter(None, [field.description, ", ".join(bounds)]))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
