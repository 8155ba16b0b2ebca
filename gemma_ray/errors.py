"""The errors that gemma_ray raises on purpose.

Each carries the exit code that the command line returns for it: 2 when what the user gave is wrong, 1 when the work itself failed.
A message names the value, where it stands, and what to do about it, in a line or two.
"""

from __future__ import annotations


class GemmaRayError(Exception):
    """The work failed."""

    exit_code = 1


class InputError(GemmaRayError):
    """Something that the user gave is wrong."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe, or a `--set` override, is wrong."""


class CompileError(RecipeError):
    """A step does not compile for the recipe's hardware; the message says why and what would help."""


class DataError(InputError):
    """Training data is missing, empty or malformed."""


class ModelError(InputError):
    """Model files are missing, incomplete, or do not fit the request."""


class CheckpointError(InputError):
    """A checkpoint is missing, or belongs to another recipe."""


class ToolError(InputError):
    """A program or package that a stage needs is not installed."""


class ResourceError(InputError):
    """A port is taken, or memory or disk is short."""


class StageError(GemmaRayError):
    """A stage ran and did not reach its result."""
