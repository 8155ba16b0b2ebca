"""Turns XLA:TPU's reason for not compiling into a sentence on what happened and one on what would help."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from gemma_ray.models.attention import SMALLEST_BLOCK

LARGEST_SHOWN = 3
LESS_MEMORY = "more rematerialisation (train.remat), fewer rows a step (train.batch_size) or more train.micro_batches"
"""What makes a training step need less of a chip's memory."""

_MIB_PER = {"": 2**-20, "K": 2**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30, "E": 2.0**40}
_SIZE = r"([\d.]+)([KMGTPE]?)(?:i?B)?"


@dataclass(frozen=True)
class Explanation:
    """Why a step did not compile, and what would help, a sentence or two each."""

    kind: str
    """`vmem`, `hbm`, `indivisible`, `no-libtpu` or `topology`."""
    happened: str
    helps: str
    block: int | None = None
    """For `vmem`: the largest smaller power of two that the kernel's blocks are estimated to fit with. It may still be too large, as the
    compiler names what it was allocating when it stopped: for splash's dkv at head dimension 512, 28.00 MiB at 2048 but 22.14 at 1024."""

    def __str__(self) -> str:
        return f"{self.happened} {self.helps}"


def explain(message: str) -> Explanation | None:
    """Read a compile failure's message; None when it is of no known kind, and its first lines are then the best that can be shown."""
    readers: tuple[Callable[[str], Explanation | None], ...] = (_scoped_vmem, _hbm, _indivisible, _topology, _libtpu)
    return next((found for read in readers if (found := read(message))), None)


def _scoped_vmem(message: str) -> Explanation | None:
    """`CompileTimeScopedVmemOom` (https://openxla.org/xla/errors/error_1001): a kernel's blocks do not fit the memory that it may use."""
    sizes = re.search(rf"Scoped allocation with size {_SIZE} and limit {_SIZE} exceeded", message)
    kernel = re.search(r"while allocating on stack for %([\w-]+)", message)
    if sizes is None or kernel is None:
        return None
    needed, allowed = _mib(sizes[1], sizes[2]), _mib(sizes[3], sizes[4])
    blocks = _blocks(message, kernel[1])
    shown = ", ".join(f"{name}={size}" for name, size in blocks.items())
    details = ", ".join(filter(None, (_head_dim(message), shown)))
    happened = (
        f"The kernel {kernel[1]}{f' ({details})' if details else ''} needs at least {needed:.2f} MiB of VMEM; {allowed:.2f} MiB is allowed."
    )
    largest = max(blocks.values(), default=0)
    block = _smaller_block(largest, needed, allowed)
    if block is None:
        return Explanation("vmem", happened, "Smaller blocks need less.")
    return Explanation("vmem", happened, f"Blocks of {block} are estimated to fit: the need falls about in proportion to the block.", block)


def _blocks(message: str, kernel: str) -> dict[str, int]:
    """Block sizes that this kernel uses: splash writes those of all its kernels (forward, dq, dkv) into each."""
    written = re.search(r'"xprof_metadata":"(\{.*?\})"', message)
    try:
        metadata = json.loads(written[1].replace('\\"', '"')) if written else {}
    except json.JSONDecodeError:
        return {}
    blocks = {name: size for name, size in metadata.items() if name.startswith("block_") and isinstance(size, int)}
    part = next((part for part in ("_dkv", "_dq") if part in kernel), "")
    own = {name: size for name, size in blocks.items() if (part in name if part else not re.search("_dkv|_dq", name))}
    return own or blocks


def _head_dim(message: str) -> str:
    """The last dimension of the queries, the kernel's first operand of three dimensions that is no mask table (those are s8 or s32)."""
    operands = re.search(r"operand_layout_constraints=\{(.*)\}, frontend_attributes", message)
    shapes = re.findall(r"(?:bf|f)\d+\[\d+,\d+,(\d+)\]", operands[1]) if operands else []
    return f"head dimension {shapes[0]}" if shapes else ""


def _smaller_block(block: int, needed: float, allowed: float) -> int | None:
    """Largest power of two below `block` that fits when memory falls in proportion to the block; None below the smallest block."""
    size = 1 << max(block - 1, 1).bit_length() - 1
    while size >= SMALLEST_BLOCK:
        if needed * size / block <= allowed:
            return size
        size //= 2
    return None


def _hbm(message: str) -> Explanation | None:
    """Out of device memory, in the compiler's early estimate (one line) or in its full report."""
    early = re.search(rf"total memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)", message)
    full = re.search(rf"memory space hbm\. Used {_SIZE} of {_SIZE} hbm", message)
    found = early or full
    if found is None:
        return None
    needed, allowed = _mib(found[1], found[2]) / 1024, _mib(found[3], found[4]) / 1024
    happened = f"A chip would need {'at least ' if early else ''}{needed:.1f} GiB of HBM and has {allowed:.1f} GiB."
    if buffers := _largest_buffers(message):
        happened += f" Largest: {'; '.join(buffers[:LARGEST_SHOWN])}."
    logits = any(re.search(r"logits|vocab|btd,vd|btv", buffer) for buffer in buffers)
    helps = [LESS_MEMORY, "a shorter length", "a mesh of more chips"]
    return Explanation("hbm", happened, f"What would help: {', '.join((['a smaller loss chunk'] if logits else []) + helps)}.")


def _largest_buffers(message: str) -> list[str]:
    """`size shape op_name` of the entries of "Largest program allocations in hbm"."""
    _, _, listing = message.partition("Largest program allocations in hbm")
    buffers = []
    for entry in re.split(r"\n\s*\d+\. (?=Size:)", listing)[1:]:
        size, shape = re.search(r"Size: (\S+)", entry), re.search(r"Shape: (\w+\[[\d,]*\])", entry)
        operator = re.search(r'op_name="([^"]*)"', entry)
        buffers.append(" ".join(part[1] for part in (size, shape, operator) if part))
    return buffers


def _indivisible(message: str) -> Explanation | None:
    """An array does not divide over the mesh: JAX's IndivisibleError, or shard_map's ValueError."""
    array = re.search(
        r"spec=P(?:artitionSpec)?\((.*?)\).*?array axis (\d+) is partitioned (\d+) times, "
        r"but the dimension size is (\d+) \(full shape: \(([\d, ]+)\)",
        message,
        re.DOTALL,
    )
    if array:
        spec, axis, parts, size, shape = array.groups()
        happened = (
            f"Dimension {axis} of an array [{shape.rstrip(', ')}] is {size}, which {parts} devices (P({spec.rstrip(',')})) do not divide."
        )
        return Explanation("indivisible", happened, f"Choose a mesh or a size so that {parts} divides {size}.")
    argument = re.search(
        r"of shape \w+\[([\d,]+)\].*?array axis (\d+) \(of size (\d+)\) to mesh axis '(\w+)' \(of size (\d+)\)", message, re.DOTALL
    )
    if argument:
        shape, axis, size, name, parts = argument.groups()
        happened = f"Dimension {axis} of an array [{shape}] is {size}, which mesh axis {name}={parts} does not divide."
        return Explanation("indivisible", happened, f"Choose a mesh or a size so that {parts} divides {size}.")
    return None


def _topology(message: str) -> Explanation | None:
    """A slice's name or shape that libtpu does not know."""
    helps = "Names are GENERATION:SHAPE, such as v5p:2x2x1 or v6e:2x4, with whole hosts of chips."
    if name := re.search(r"Invalid TPU external name: (?:TPU )?(.+)", message):
        return Explanation("topology", f"This libtpu does not know the TPU generation {name[1].strip()}.", helps)
    if layout := re.search(r'Topology layout "([^"]+)" is not divisible by .*?chips_per_host_bounds "([^"]+)"', message):
        return Explanation("topology", f"A slice {layout[1]} is not made of whole hosts, which hold {layout[2]} chips.", helps)
    if name := re.search(r"Your TPU topology name (\S*) is invalid", message):
        return Explanation("topology", f"{name[1] or 'An empty name'} is not a slice's name.", helps)
    return None


def _libtpu(message: str) -> Explanation | None:
    """The compiler is not installed, or another process has it."""
    if re.search(r"JAX TPU support not installed|No module named '?libtpu|libtpu\.so.*(?:not found|cannot open)", message):
        return Explanation(
            "no-libtpu",
            "This Python environment has no libtpu, the library that holds the compiler for TPUs.",
            "`make plan-env` builds one that has, or set GEMMA_RAY_PLAN_PYTHON to the python of an environment with jax[tpu].",
        )
    if "libtpu" in message and re.search(r"lockfile|already in use", message):
        return Explanation("no-libtpu", "Another process holds libtpu.", "Set ALLOW_MULTIPLE_LIBTPU_LOAD=1, as PLAN_ENVIRONMENT does.")
    return None


def _mib(number: str, unit: str) -> float:
    return float(number) * _MIB_PER[unit]
