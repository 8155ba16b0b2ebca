"""The base of every recipe section: unknown keys are refused, values are checked, sections are immutable."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
"""A time limit: above 0, at most 30 days."""

LARGEST = 2**53
# YAML 1.1 reads these as text: a number with an exponent but no dot or no sign, and inf without its dot.
_NUMBER_IN_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)e[+-]?\d+|[+-]?inf", re.IGNORECASE)


class Section(BaseModel):
    """One section of the recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _kinds_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what Python would convert: true is 1, "8" is 8, "yes" is true; and a number that is none to count with."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        if not kinds & {int, float, bool} or Any in kinds:
            return value
        if isinstance(value, list | tuple):
            return [_checked(kinds, item) for item in value]
        if isinstance(value, dict):
            return {key: _checked(kinds, item) for key, item in value.items()}
        value = _checked(kinds, value)
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ValueError(f"a number of at most {LARGEST:.0e} is wanted")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of, the keys of a dict left out."""
    parts = get_args(annotation)[1:] if get_origin(annotation) is dict else get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}


def _checked(kinds: set[Any], value: Any) -> Any:
    if bool in kinds and isinstance(value, str | int | float) and not isinstance(value, bool):
        raise ValueError("write true or false, without quotes")
    if kinds & {bool, str} or not isinstance(value, bool | str):
        return value
    if isinstance(value, str) and float in kinds and _NUMBER_IN_TEXT.fullmatch(value):
        return float(value)
    example = "a number, such as 0.5 or 1e-4" if float in kinds else "a whole number in digits, such as 8"
    raise ValueError(f"write {example}, without quotes")
