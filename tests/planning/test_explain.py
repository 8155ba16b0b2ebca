"""Messages that libtpu 0.0.42 and JAX 0.10.2 wrote for small programs on a v5p 2x2x1, and what is made of them.

`vmem_*.txt` are splash attention at head dimension 512 with blocks of 1024; `hbm_early.txt` is a softmax and a sort of 70,000 x 262,144.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_ray.planning.explain import explain

DATA = Path(__file__).parent / "data"

# The full report, which XLA:TPU writes when only buffer assignment finds the overflow; its form as in EasyDeL's issue 166 and others.
HBM_REPORT = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 112.3G of 95.74G hbm. \
Exceeded hbm capacity by 16.6G.

Program hbm requirement 112.3G:
    HLO temp        97.7G (100.0% utilization: Unpadded (97.7G) Padded (97.7G), 0.1% fragmentation (90.1M))

  Largest program allocations in hbm:

  1. Size: 16.00G
     Operator: op_name="jit(_run)/jvp()/btd,vd->btv/dot_general" stack_frame_id=285
     Shape: f32[16384,262144]{1,0:T(8,128)}
     Unpadded size: 16.00G
     Allocation type: HLO temp
     ==========================

  2. Size: 672.00M
     Shape: bf16[4,4096,21504]{2,1,0:T(8,128)(2,1)}
     Allocation type: HLO temp
     ==========================
"""


def test_vmem_of_a_backward_kernel() -> None:
    found = explain((DATA / "vmem_dkv.txt").read_text())
    assert found is not None and found.kind == "vmem"
    assert found.happened == (
        "The kernel splash_mha_dkv_segmented_no_residuals (head dimension 512, block_q_dkv=1024, block_kv_dkv=1024, "
        "block_kv_dkv_compute=1024) needs at least 22.14 MiB of VMEM; 16.00 MiB is allowed."
    )
    # 22.14 at 1024 is 11.07 at 512.
    assert found.block == 512
    assert "Blocks of 512 are estimated to fit" in found.helps


def test_vmem_of_a_forward_kernel_names_its_own_blocks() -> None:
    found = explain((DATA / "vmem_forward.txt").read_text())
    assert found is not None
    assert "(head dimension 512, block_q=1024, block_kv=1024, block_kv_compute=1024) needs at least 18.00 MiB" in found.happened


def test_the_block_is_halved_until_it_fits() -> None:
    message = (DATA / "vmem_forward.txt").read_text().replace("with size 18.00M", "with size 70.00M")
    found = explain(message)
    # 70 at 1024, 35 at 512, 17.5 at 256, 8.75 at 128.
    assert found is not None and found.block == 128
    hopeless = explain(message.replace("with size 70.00M", "with size 2.00G"))
    assert hopeless is not None and hopeless.block is None


def test_vmem_of_a_kernel_that_names_no_blocks() -> None:
    found = explain(
        "Ran out of memory in memory space vmem while allocating on stack for %my_kernel.1 = f32[8] custom-call(). "
        "Scoped allocation with size 17.07M and limit 16.00M exceeded scoped vmem limit by 1.07M."
    )
    assert found is not None and found.block is None
    assert found.happened == "The kernel my_kernel needs at least 17.07 MiB of VMEM; 16.00 MiB is allowed."


def test_hbm_found_short_early() -> None:
    found = explain((DATA / "hbm_early.txt").read_text())
    assert found is not None and found.kind == "hbm"
    assert found.happened == "A chip would need at least 171.5 GiB of HBM and has 95.7 GiB."
    assert "train.remat" in found.helps and "train.micro_batches" in found.helps and "mesh" in found.helps


def test_hbm_with_its_largest_buffers() -> None:
    found = explain(HBM_REPORT)
    assert found is not None
    assert found.happened == (
        "A chip would need 112.3 GiB of HBM and has 95.7 GiB. Largest: 16.00G f32[16384,262144] "
        "jit(_run)/jvp()/btd,vd->btv/dot_general; 672.00M bf16[4,4096,21504]."
    )
    assert "a smaller loss chunk" in found.helps


@pytest.mark.parametrize(
    "message",
    [
        "Sharding NamedSharding(mesh=Mesh('x': 4, axis_types=(Auto,)), spec=P('x',), memory_kind=device) implies that array axis 0 is "
        "partitioned 4 times, but the dimension size is 6 (full shape: (6, 8), per-dimension tiling factors: [4, 1] should evenly divide "
        "the shape)",
        "the passed args[0] of shape float32[6,8], where args[0] is bound to <lambda>'s parameter 'x', corresponds to in_specs of value "
        "P('x',), which maps array axis 0 (of size 6) to mesh axis 'x' (of size 4), but 4 does not evenly divide 6",
    ],
)
def test_arrays_that_do_not_divide(message: str) -> None:
    found = explain(message)
    assert found is not None and found.kind == "indivisible"
    assert found.happened.startswith("Dimension 0 of an array [6,") and " is 6, which " in found.happened
    assert found.helps == "Choose a mesh or a size so that 4 divides 6."


@pytest.mark.parametrize(
    ("message", "happened"),
    [
        ("INVALID_ARGUMENT: Invalid TPU external name: TPU v9z", "This libtpu does not know the TPU generation v9z."),
        (
            'INVALID_ARGUMENT: Topology layout "v6e:3x3" is not divisible by the given (or default) chips_per_host_bounds "2x2x1"',
            "A slice v6e:3x3 is not made of whole hosts, which hold 2x2x1 chips.",
        ),
        (
            r"INVALID_ARGUMENT: Your TPU topology name nonsense is invalid and does not match regex: ^([a-zA-Z0-9\_ ]+)[=\_:]([0-9x]+)$",
            "nonsense is not a slice's name.",
        ),
    ],
)
def test_slices_that_do_not_exist(message: str, happened: str) -> None:
    found = explain(message)
    assert found is not None and (found.kind, found.happened) == ("topology", happened)
    assert "v5p:2x2x1" in found.helps


def test_libtpu_is_missing() -> None:
    found = explain(
        "RuntimeError: JAX TPU support not installed; cannot generate TPU topology. See https://github.com/jax-ml/jax#installation"
    )
    assert found is not None and found.kind == "no-libtpu" and "make plan-env" in str(found)


@pytest.mark.parametrize("message", ["", "INTERNAL: Mosaic failed to compile TPU kernel", "Ran out of memory in memory space smem"])
def test_anything_else_is_left_to_the_caller(message: str) -> None:
    assert explain(message) is None
