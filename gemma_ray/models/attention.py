"""Attention over rows that hold several documents: causal, within a sliding window, and never across documents.

    kernel   runs on                    memory of a layer
    dot      anything                   [batch, heads, length, length], less what no block of queries may see
    splash   TPU (CPU: interpreted)     a block at a time; blocks that the mask empties are skipped

Both take `segments` [batch, length]: equal numbers see each other. Tunix's own flash path has none (google/tunix, models/gemma4/model.py),
which is why its attention layer is given another core here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import jax

Kernel = Literal["dot", "splash"]

# head_dim → the largest block that fits 16 MB of a v5p's vector memory, forward and backward. Found by compiling; docs/planning.md.
SPLASH_BLOCKS = {256: 512, 512: 512}
SMALLEST_BLOCK = 128
"""The kernel's tiles are of 128 positions, the lanes of a TPU vector register."""

DOT_BLOCK, DOT_BLOCKS = 128, 8
"""Queries that dot takes at a time, at least, and how many such blocks, at most: each is compiled for itself."""

_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")

OUTPUT = "attention_output"
"""Name under which a rematerialisation policy may keep what attention computed."""


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, *, window: int | None, kernel: Kernel, block: int | None = None
) -> jax.Array:
    """Attention of query [batch, length, heads, dim] over key and value [batch, length, kv heads, dim]; like query.

    A position sees itself and those before it in its segment, the last `window` of them when given. Scores are not scaled: Gemma 4
    normalises query and key instead. `block` is splash's block size; by default the largest that `SPLASH_BLOCKS` knows to fit.
    """
    if kernel == "splash":
        return _splash(query, key, value, segments, window, block)
    return _dot(query, key, value, segments, window)


def _dot(query: Any, key: Any, value: Any, segments: Any, window: int | None) -> jax.Array:
    """A block of queries at a time, over the keys that any of them may see."""
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    length = query.shape[1]
    side = max(DOT_BLOCK, -(-length // DOT_BLOCKS))
    parts = []
    for start in range(0, length, side):
        queries, keys = slice(start, start + side), slice(max(0, start + 1 - (window or length)), start + side)
        seen = visible(segments, window, queries, keys)
        parts.append(_dot_block(query[:, queries], key[:, keys], value[:, keys], seen))
    return checkpoint_name(jnp.concatenate(parts, axis=1), OUTPUT)


def _dot_block(query: Any, key: Any, value: Any, seen: Any) -> jax.Array:
    import jax
    import jax.numpy as jnp

    batch, length, heads, dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(value.dtype), value).reshape(query.shape)


def visible(segments: jax.Array, window: int | None, queries: slice, keys: slice) -> jax.Array:
    """Which of these keys each of these queries sees, bool [batch, query, key]."""
    import jax.numpy as jnp

    place = jnp.arange(segments.shape[1])
    distance = place[queries, None] - place[None, keys]
    near = (distance >= 0) & (distance < (window or segments.shape[1]))
    return near[None] & (segments[:, queries, None] == segments[:, None, keys])


def _splash(query: Any, key: Any, value: Any, segments: Any, window: int | None, block: int | None) -> jax.Array:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.sharding import NamedSharding, PartitionSpec

    from gemma_ray.models.axes import ROWS_OVER
    from gemma_ray.models.placing import current_mesh

    mesh = current_mesh()
    length, heads, dim = query.shape[1:]
    side = block_size(length, dim, block)
    mask: Any = masks.LocalMask((length, length), (window - 1, 0), 0) if window and window < length else masks.CausalMask((length, length))
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(_BLOCKS, side)),
        head_shards=mesh.shape["tp"],
        q_seq_shards=1,
        residual_checkpoint_name=OUTPUT,
        interpret=mesh.devices.flat[0].platform == "cpu",
    )
    by_head = PartitionSpec(ROWS_OVER, "tp", None, None)
    of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec("tp", None)))

    def on_device(kernel: Any, q: Any, k: Any, v: Any, segments: Any) -> Any:
        rows: Any = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=splash.SegmentIds(s, s)))
        return rows(q, k, v, segments)

    specs = (of_kernel, by_head, by_head, by_head, PartitionSpec(ROWS_OVER, None))
    sharded: Any = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=by_head, check_vma=False)
    return sharded(kernel, *(x.swapaxes(1, 2) for x in (query, key, value)), segments).swapaxes(1, 2)


def pick_kernel(wanted: str, platform: str, length: int, text: dict[str, Any]) -> Kernel:
    """The kernel for rows of `length` on a JAX platform: splash on TPU where it takes the rows and the head sizes, dot elsewhere.

    `wanted` is `auto` or a kernel's name, `text` config.json's text part.
    """
    if wanted != "auto":
        return "splash" if wanted == "splash" else "dot"
    sizes = (length, text["head_dim"], text["global_head_dim"])
    return "splash" if platform == "tpu" and not any(size % SMALLEST_BLOCK for size in sizes) else "dot"


def block_size(length: int, dim: int, wanted: int | None = None) -> int:
    """Splash's block for rows of `length` and a head dimension: the wanted one or the table's, or the next smaller that divides the length.

    Raises ModelError when no block of 128 positions or more does.
    """
    from gemma_ray.errors import ModelError

    side = wanted or SPLASH_BLOCKS.get(dim, max(SPLASH_BLOCKS.values()))
    fitting = [n for n in range(SMALLEST_BLOCK, side + 1, SMALLEST_BLOCK) if length % n == 0]
    if not fitting:
        raise ModelError(f"rows of {length} tokens: splash attention wants a multiple of {SMALLEST_BLOCK}. Change data.max_seq_len")
    return fitting[-1]
