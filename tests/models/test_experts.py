"""Experts: routing and sums against transformers' own modules, on one device and on meshes, forward and backward."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_gemma import SHORT, rewrite_tensors, write_uneven_gemma

from gemma_ray.models.axes import AXES
from gemma_ray.models.experts import Experts
from gemma_ray.models.gemma4 import read_text_config, text_config, tunix_config
from gemma_ray.models.parameter_map import gemma4_rows

PRESET = "gemma4-tiny-26b-a4b"
TEXT = text_config(PRESET)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' router and experts with random weights and uneven scales."""
    import torch
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter

    config = Gemma4TextConfig(**{k: v for k, v in TEXT.items() if k not in ("architectures", "model_type", "dtype")})
    config._experts_implementation = "eager"
    parts = torch.nn.ModuleDict({"router": Gemma4TextRouter(config), "experts": Gemma4TextExperts(config)})
    torch.manual_seed(0)
    for parameter in parts.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if parameter.ndim == 1 else torch.nn.init.normal_(parameter, std=0.1)
    return parts


@pytest.fixture(scope="module")
def experts(oracle: Any) -> Experts:
    """Ours, with the same weights."""
    module = Experts(tunix_config(TEXT, "float32"), rngs=nnx.Rngs(0))
    tensors = {name: tensor.detach().numpy() for name, tensor in oracle.named_parameters()}
    for row in gemma4_rows(TEXT):
        if row.tunix.startswith("layers.0.moe."):
            parameter = getattr(module, row.tunix.rsplit(".", 1)[1])
            hf = [tensors[name.removeprefix("layers.0.")] for name in row.hf]
            parameter.set_value(jax.numpy.asarray(row.layout.to_tunix(*hf, shape=parameter.get_value().shape)))
    return module


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh((1, *shape), AXES, devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * 3)


def rows(count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """What the experts see and what the router sees, [count, length, embed]."""
    random = np.random.default_rng(0)
    x, router = random.standard_normal((2, count, length, TEXT["hidden_size"])).astype(np.float32)
    return x, router


def expected(oracle: Any, x: np.ndarray, router_input: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """transformers' sum, and its derivative for x where the sum is weighted with x."""
    import torch

    flat = torch.tensor(x.reshape(-1, x.shape[-1]), requires_grad=True)
    _, weights, choices = oracle["router"](torch.tensor(router_input.reshape(-1, x.shape[-1])))
    out = oracle["experts"](flat, choices, weights)
    (out * flat.detach()).sum().backward()
    assert flat.grad is not None
    return out.detach().numpy().reshape(x.shape), flat.grad.numpy().reshape(x.shape)


def test_the_router_chooses_as_transformers(oracle: Any, experts: Experts) -> None:
    import torch

    _, router_input = rows(4, 32)
    _, weights, choices = oracle["router"](torch.tensor(router_input.reshape(-1, router_input.shape[-1])))
    with jax.default_matmul_precision("highest"):
        found_choices, found_weights = experts.route(jax.numpy.asarray(router_input))
    assert np.array_equal(np.asarray(found_choices).reshape(-1, 2), choices.numpy())
    assert np.allclose(np.asarray(found_weights).reshape(-1, 2), weights.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (4, 2), (2, 4)])
def test_sum_and_gradient_are_those_of_transformers_on_a_mesh(oracle: Any, experts: Any, shape: tuple[int, int]) -> None:
    x, router_input = rows(8, 24)
    router_input[5:] = router_input[5, 0]  # as in padding, all choose alike
    want, want_gradient = expected(oracle, x, router_input)
    mesh = mesh_of(shape)
    graph, state = nnx.split(experts)

    def weighted(x: Any, weight: Any) -> Any:
        out = nnx.merge(graph, state)(x, jax.numpy.asarray(router_input))
        return (out * weight).sum(), out

    with mesh, jax.default_matmul_precision("highest"):
        gradient, found = jax.jit(jax.grad(weighted, has_aux=True))(x, x)
    assert np.abs(np.asarray(found) - want).max() < 1e-5 * np.abs(want).max()
    assert np.abs(np.asarray(gradient) - want_gradient).max() < 1e-5 * np.abs(want_gradient).max()


def test_the_gradient_of_the_weights_does_not_depend_on_the_mesh(experts: Experts) -> None:
    x, router_input = map(jax.numpy.asarray, rows(8, 12))
    graph, state = nnx.split(experts)
    found = []
    for shape in ((1, 1), (4, 2)):
        mesh = mesh_of(shape)
        with mesh, jax.default_matmul_precision("highest"):
            gradient = jax.jit(jax.grad(lambda state: (nnx.merge(graph, state)(x, router_input) ** 2).sum()))(state)
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(gradient)])
    for alone, spread in zip(*found, strict=True):
        assert np.abs(alone).max() > 0
        assert np.abs(alone - spread).max() <= 1e-5 * np.abs(alone).max()


@pytest.mark.parametrize("even", [True, False])
def test_upstream_still_routes_by_what_the_experts_norm_has_scaled(even: bool, tmp_path: Path) -> None:
    """Fails when google/tunix, models/gemma4/model.py, is mended; `PackedDecoderLayer` is then needless.

    With even scales of that norm the two agree, so a random model does not show it.
    """
    folder = write_uneven_gemma(tmp_path / "model", PRESET, **SHORT[PRESET])
    if even:
        norm = "pre_feedforward_layernorm_2"
        rewrite_tensors(folder, lambda t: {name: np.ones_like(tensor) if norm in name else tensor for name, tensor in t.items()})
    tokens = np.random.default_rng(0).integers(8, 1024, (4, 24)).astype(np.int32)
    difference = np.abs(upstream_logits(folder, tokens, tmp_path / "renamed") - transformers_logits(folder, tokens)).max()
    assert difference < 2e-4 if even else difference > 1e-2


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch
    from transformers import Gemma4ForCausalLM

    model: Any = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def upstream_logits(folder: Path, tokens: np.ndarray, renamed: Path) -> np.ndarray:
    """Tunix's model as it is, by its own loader, which knows the released files' names alone."""
    from tunix.models.gemma4 import params_safetensors

    shutil.copytree(folder, renamed)
    rewrite_tensors(renamed, lambda t: {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in t.items()})
    config = tunix_config(read_text_config(folder), "float32")
    with mesh_of((4, 2)) as mesh, jax.default_matmul_precision("highest"):
        model: Any = params_safetensors.create_model_from_safe_tensors(str(renamed), config, mesh, dtype=jax.numpy.float32)
        causal = np.tril(np.ones((*tokens.shape, tokens.shape[1]), bool))
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        return np.asarray(nnx.jit(lambda m, *inputs: m(inputs[0], inputs[1], None, inputs[2])[0])(model, tokens, positions, causal))
