"""What training goes on with after a loss."""

from pathlib import Path

import pytest

from gemma_ray.errors import RecipeError
from gemma_ray.recipe import parse_recipe
from gemma_ray.training.config import MeshConfig
from raycluster.errors import ClusterError
from raycluster.slices import fallbacks, resolve
from workloads.spmd import fits, mesh_on
from workloads.stage import preflight, slice_of, smaller_slices


def recipe(**cluster):
    return parse_recipe({"cluster": {"accelerator": "v5p", "topology": "2x2x1", "emulate": True, **cluster}})


def test_a_recipe_names_slices_and_how_few_will_do():
    wanted = recipe(slices=3, min_slices=2)
    hardware = slice_of(wanted)
    assert (hardware.slices, hardware.devices, hardware.devices_per_slice) == (3, 12, 4)
    assert [used.slices for used in smaller_slices(wanted, hardware)] == [2]


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"min_hosts": 1}, r"cluster\.min_hosts = 1: a TPU slice is lost whole\. Use cluster\.min_slices"),
        ({"accelerator": "cpu", "topology": None, "min_slices": 1}, r"cluster\.min_slices = 1: cpu has no slices\. Use cluster\.min_hosts"),
        ({"min_slices": 2}, r"min_slices = 2: .* has 1 slices"),
        ({"accelerator": "h100", "topology": None, "slices": 2}, "slices = 2: h100 is not made of slices"),
    ],
)
def test_keys_that_do_not_go_with_the_hardware_are_refused(cluster, said):
    with pytest.raises((RecipeError, ClusterError), match=said):
        smaller_slices(recipe(**cluster), slice_of(recipe(**cluster)))


def test_a_batch_that_the_slices_cannot_share_is_refused_before_anything_starts():
    wanted = parse_recipe(
        {
            "cluster": {"accelerator": "v5p", "topology": "2x2x1", "slices": 3, "emulate": True},
            "mesh": {"fsdp": 2, "tp": 2},
            "train": {"batch_size": 8},
        }
    )
    with pytest.raises(RecipeError, match="3 slices x fsdp=6"):
        preflight(wanted)


def test_lost_hosts_shorten_fsdp_and_a_lost_slice_takes_its_copy_of_the_mesh():
    hosts = resolve("h100", hosts=4, devices_per_host=2)
    assert [mesh_on(used, MeshConfig(fsdp=4, tp=2)) for used in fallbacks(hosts, 2)] == [MeshConfig(fsdp=3, tp=2), MeshConfig(fsdp=2, tp=2)]
    slices = resolve("v5p", "2x2x1", slices=2)
    assert mesh_on(fallbacks(slices, 1)[0], MeshConfig(fsdp=2, tp=2)) == MeshConfig(fsdp=2, tp=2)


def test_only_what_divides_batch_and_model_is_gone_on_with(tiny_gemma: Path):
    hosts = resolve("h100", hosts=4, devices_per_host=1)
    assert [used.hosts for used in fallbacks(hosts, 1) if fits(used, MeshConfig(fsdp=4, tp=1), tiny_gemma, rows=8)] == [2, 1]
    assert not fits(resolve("h100", devices_per_host=1), MeshConfig(fsdp=2, tp=2), tiny_gemma, rows=8)
