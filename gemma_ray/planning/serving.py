"""A serving plan: what a replica of so many chips can hold, and how fast at best it could answer. Nothing is run or compiled.

HBM × utilisation = weights + activations + key-value cache        how many sequences fit
prefill floor       Σ over chunks of the larger of compute and weight read           no first token comes sooner
decode floor        the larger of compute and (weights + cache) / HBM bandwidth      no token comes sooner
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemma_ray.errors import RecipeError
from gemma_ray.planning.hardware import GIB, Chip
from gemma_ray.planning.sizes import attention_flops_per_token, forward_flops_per_token, layers

USABLE_HBM = {"v6e": 31.25 * GIB, "v4": 30.75 * GIB}
"""What XLA leaves a program, where known: v6e by arXiv 2605.25645, v4 by XLA's own message in erfanzar/EasyDeL issue 166."""


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on one device, by how a step reads them."""

    always: float
    experts: float  # of which a step reads those that its tokens are routed to
    rows: float  # the per-layer embeddings of E2B and E4B, of which a step reads one row a token
    idle_share: float  # share of the experts that one token leaves alone

    @property
    def total(self) -> float:
        """All of them."""
        return self.always + self.experts + self.rows

    def read(self, tokens: int) -> float:
        """What a step of so many tokens reads, when tokens choose experts independently and evenly."""
        return self.always + self.experts * (1 - self.idle_share**tokens)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of keys and values on one device for each token that is kept."""

    in_global: float
    in_sliding: float
    window: int

    def of(self, length: int) -> float:
        """A sequence of `length` tokens whose sliding-window layers keep their window."""
        return self.in_global * length + self.in_sliding * min(length, self.window)


@dataclass(frozen=True)
class Decode:
    """One step in which each of `batch` sequences gets a token, half-way through their answers."""

    batch: int  # sequences of one replica
    memory_s: float
    compute_s: float
    tpot_floor_s: float
    tokens_per_s_ceiling: float  # output tokens a second of all replicas
    usd_per_million_tokens_floor: float | None  # at that ceiling, decoding alone; None where the chip has no price


@dataclass(frozen=True)
class ContextPlan:
    """What one context length allows. Bytes are of one device, sequences of one replica."""

    context: int  # tokens of the prompt
    kv_bytes: float  # of one sequence at its end, prompt and answer
    sequences: int
    sequences_whole: int  # the same where sliding-window layers keep every token
    missing_bytes: float  # that one sequence lacks; 0 when it fits
    chunks: tuple[tuple[int, int], ...]  # tokens of each chunk of the prompt, and what it is padded to
    padding_share: float  # of the positions that are computed
    prefill_compute_s: float
    prefill_memory_s: float
    ttft_floor_s: float
    alone: Decode | None
    full: Decode | None  # at the largest batch; None, like `alone`, where not one sequence fits


@dataclass(frozen=True)
class ServePlan:
    """A prediction for one model on one kind of replica. Bytes are of one device."""

    devices: int
    tp: int
    replicas: int
    memory_bytes: float
    weight_bytes: float
    activation_bytes: float
    kv_budget_bytes: float  # left for keys and values; below 0 when the weights alone do not fit
    kv_bytes_per_token: CacheBytes
    token_buckets: tuple[int, ...]  # step sizes that vLLM compiles on a TPU; none on a GPU
    contexts: tuple[ContextPlan, ...]
    fits: bool  # whether at least one sequence of every context does
    missing_bytes: float
    assumptions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As JSON, named as a prediction."""
        return {"prediction": True, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class _Replica:
    text: dict[str, Any]
    chip: Chip
    tp: int
    devices: int
    weights: Weights
    stored: CacheBytes
    read: CacheBytes
    buckets: tuple[int, ...]
    product_flops: float  # a second, of the matrix units at the weights' precision


def plan_serving(
    text: dict[str, Any],
    chip: Chip,
    devices: int,
    tp: int,
    weight_bytes_per_element: float,
    kv_bytes_per_element: float,
    contexts: Sequence[int],
    output_tokens: int,
    memory_utilization: float = 0.9,
    activation_bytes: float | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> ServePlan:
    """The plan of `devices / tp` replicas for prompts of `contexts` tokens. `text` is config.json's text part; `activation_bytes`, of one
    device, are estimated when None. For a model that is too large `fits` is false, and `missing_bytes` says by how much.

    Raises RecipeError when `tp` neither splits nor evenly replicates the heads, does not divide `devices`, or a number makes no sense.
    """
    numbers = {"devices": devices, "tp": tp, "output_tokens": output_tokens, "memory_utilization": memory_utilization}
    numbers |= {"weight_bytes_per_element": weight_bytes_per_element, "kv_bytes_per_element": kv_bytes_per_element}
    _check(text, devices, tp, {**numbers, "max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}, contexts)
    on_tpu = chip.name.startswith("v")  # TPUs are named by generation: v5p
    weights = weight_bytes(text, tp, weight_bytes_per_element)
    stored, read = (cache_bytes(text, tp, kv_bytes_per_element, on_tpu, shared) for shared in (False, True))
    guess = estimated_activation_bytes(text, tp, max_num_batched_tokens, max_num_seqs)
    activations = guess if activation_bytes is None else activation_bytes
    memory = min(chip.hbm_bytes, USABLE_HBM.get(chip.name, chip.hbm_bytes))
    budget = memory_utilization * memory - weights.total - activations
    rate = chip.int8_ops if weight_bytes_per_element <= 1 else chip.bf16_flops
    buckets = token_buckets(max_num_batched_tokens) if on_tpu else ()
    replica = _Replica(text, chip, tp, devices, weights, stored, read, buckets, rate)
    planned = tuple(_context(replica, n, output_tokens, budget, max_num_batched_tokens, max_num_seqs) for n in contexts)
    missing = max(c.missing_bytes for c in planned)
    named = _assumptions(replica, memory_utilization, memory, max_num_seqs, activation_bytes is None)
    held = (memory, weights.total, activations, budget, stored, buckets)
    return ServePlan(devices, tp, devices // tp, *held, planned, missing == 0, missing, named)


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Step sizes in tokens that vLLM compiles on a TPU: powers of two from 16 to the first that holds `max_num_batched_tokens`.

    vllm-project/tpu-inference, tpu_inference/runner/utils.py, `get_token_paddings`, as tpu_runner.py calls it with
    VLLM_TPU_BUCKET_PADDING_GAP at its default of 0 and one data-parallel rank.
    """
    found = [16]
    while found[-1] < max_num_batched_tokens:
        found.append(2 * found[-1])
    return tuple(found)


def mean_kept(first: int, last: int, window: int) -> float:
    """The mean of min(length, window) over the lengths from `first` to `last`."""
    short = max(0, min(last, window) - first + 1)
    return (short * (first + min(last, window)) / 2 + (last - first + 1 - short) * window) / (last - first + 1)


def weight_bytes(text: dict[str, Any], tp: int, bytes_per_element: float) -> Weights:
    """Bytes of one device under vLLM's tensor parallelism (vllm 0.31, models/gemma4.py): KV heads fewer than `tp` are replicated, V is held
    beside K where the checkpoint has K alone; norms, router and per-layer gates are on every device. Below two bytes an element only
    the matrices of the layers shrink; tables, norms and router stay bfloat16."""
    d, n, p = text["hidden_size"], text["num_attention_heads"], text.get("hidden_size_per_layer_input") or 0
    moe, count, vocab = bool(text.get("enable_moe_block")), text["num_hidden_layers"], text["vocab_size"]
    matrices, plain = 0.0, vocab * d / tp + d + p
    for layer in layers(text):
        matrices += (2 * d * n * layer.head_dim + 3 * d * layer.mlp + d * p) / tp + 2 * d * p
        matrices += 2 * d * max(1, layer.kv_heads // tp) * layer.head_dim if layer.makes_kv else 0
        plain += (4 + 3 * moe + bool(p)) * d + layer.head_dim * (2 if layer.makes_kv else 1)
    table, full = text.get("vocab_size_per_layer_input", vocab) * count * p / tp, max(bytes_per_element, 2)
    if not moe:
        return Weights(matrices * bytes_per_element + plain * full, 0.0, table * full, 0.0)
    experts, plain = text["num_experts"], plain + count * (d * text["num_experts"] + d + text["num_experts"])
    expert = count * 3 * d * text["moe_intermediate_size"] * experts / tp * bytes_per_element
    return Weights(matrices * bytes_per_element + plain * full, expert, table * full, 1 - text["top_k_experts"] / experts)


def cache_bytes(text: dict[str, Any], tp: int, bytes_per_element: float, on_tpu: bool, shared: bool) -> CacheBytes:
    """Keys and values of one device: what is stored, or with `shared` what a step reads, layers that use an earlier layer's included.

    On a TPU, K and V heads together fill whole 32-bit words and a head whole lanes of 128 (tpu-inference,
    kernels/ragged_paged_attention/v3/kernel.py, `get_kv_cache_shape`): a device with one KV head gains nothing by fp8.
    """
    total, (word, lanes) = {True: 0.0, False: 0.0}, (max(1, int(4 / bytes_per_element)), 128) if on_tpu else (1, 1)
    for layer in layers(text):
        heads = -(-2 * max(1, layer.kv_heads // tp) // word) * word
        if layer.makes_kv or shared:
            total[layer.is_global] += heads * -(-layer.head_dim // lanes) * lanes * bytes_per_element
    return CacheBytes(total[True], total[False], text["sliding_window"])


def estimated_activation_bytes(text: dict[str, Any], tp: int, tokens: int, sequences: int) -> float:
    """A guess for one device: bfloat16 hidden states, heads and MLP of one layer for a step's tokens, and fp32 logits twice over."""
    widest = max(text["num_attention_heads"] * layer.head_dim + 3 * layer.mlp for layer in layers(text))
    return 2 * tokens * (4 * text["hidden_size"] + widest / tp) + 2 * 4 * min(sequences, tokens) * text["vocab_size"]


def _padded(buckets: tuple[int, ...], tokens: int) -> int:
    return next((bucket for bucket in buckets if bucket >= tokens), tokens)


def _context(replica: _Replica, context: int, output: int, budget: float, chunk: int, max_num_seqs: int) -> ContextPlan:
    end = context + output
    kv, whole = replica.stored.of(end), (replica.stored.in_global + replica.stored.in_sliding) * end
    sequences, sequences_whole = max(0, int(budget // kv)), max(0, int(budget // whole))
    lengths = [min(chunk, context - start) for start in range(0, context, chunk)]
    chunks = tuple((tokens, _padded(replica.buckets, tokens)) for tokens in lengths)
    padding, times = 1 - context / sum(padded for _, padded in chunks), _prefill(replica, chunks)
    compute, memory, floor = sum(c for c, _ in times), sum(m for _, m in times), sum(map(max, times))
    batches = [_decode(replica, context, output, n) for n in (1, min(sequences, max_num_seqs)) if sequences]
    alone, full = batches or (None, None)
    return ContextPlan(context, kv, sequences, sequences_whole, max(0.0, kv - budget), chunks, padding, compute, memory, floor, alone, full)


def _prefill(replica: _Replica, chunks: tuple[tuple[int, int], ...]) -> list[tuple[float, float]]:
    """Seconds of compute and of reading weights, chunk by chunk. Logits are worked out for one position, the last."""
    text, chip, done, times = replica.text, replica.chip, 0, []
    head = 2 * text["vocab_size"] * text["hidden_size"]
    for tokens, padded in chunks:
        attention = (done + tokens) * attention_flops_per_token(text, done + tokens)
        attention -= done * attention_flops_per_token(text, done) if done else 0
        products = (forward_flops_per_token(text) - head) * padded + head
        compute = (products / replica.product_flops + attention / chip.bf16_flops) / replica.tp
        times.append((compute, replica.weights.read(tokens) / chip.hbm_bandwidth))
        done += tokens
    return times


def _decode(replica: _Replica, context: int, output: int, batch: int) -> Decode:
    """The mean step over an answer, at caches of context + 1 to context + output tokens."""
    text, chip = replica.text, replica.chip
    keys = {True: context + (1 + output) / 2, False: mean_kept(context + 1, context + output, text["sliding_window"])}
    cache = batch * (replica.read.in_global * keys[True] + replica.read.in_sliding * keys[False])
    memory = (replica.weights.read(batch) + cache) / chip.hbm_bandwidth
    attention = sum(4 * text["num_attention_heads"] * layer.head_dim * keys[layer.is_global] for layer in layers(text))
    products = forward_flops_per_token(text) * _padded(replica.buckets, batch)
    compute = (products / replica.product_flops + batch * attention / chip.bf16_flops) / replica.tp
    per_s = batch / max(memory, compute) * (replica.devices // replica.tp)
    usd = None if chip.usd_per_hour is None else chip.usd_per_hour * replica.devices / 3600 / per_s * 1e6
    return Decode(batch, memory, compute, max(memory, compute), per_s, usd)


def _assumptions(replica: _Replica, utilization: float, memory: float, max_num_seqs: int, guessed: bool) -> dict[str, str]:
    text, chip, on_tpu = replica.text, replica.chip, bool(replica.buckets)
    buckets = "powers of two from 16, each compiled at start (tpu-inference, runner/utils.py, get_token_paddings)"
    activations = "estimated: a layer's hidden states, heads and MLP, and fp32 logits twice" if guessed else "as given"
    return {
        "prediction": "nothing was run or compiled; floors and ceilings that no engine passes, not what it reaches",
        "chip": f"{chip.name}: {replica.product_flops:.4g} operations/s in products, {chip.bf16_flops:.4g} FLOP/s in attention, "
        f"{chip.hbm_bandwidth:.4g} B/s ({chip.source}, {chip.as_of})",
        "price": "none known" if chip.usd_per_hour is None else f"{chip.usd_per_hour:.2f} USD a chip-hour ({chip.price_source})",
        "memory": f"{utilization:.0%} of {memory / GIB:.2f} GiB, cache pages not rounded up; activations {activations}",
        "weights": "as vLLM 0.31 holds them: few KV heads replicated, V held beside K; at 1 byte, matrices of the layers alone",
        "8-bit arithmetic": "weights of 1 byte multiply at the chip's 8-bit peak (int8 on TPU and A100, fp8 on H100 and H200)",
        "sliding window": "layers keep their window alone; `sequences_whole` is for an engine that keeps all tokens in every layer",
        "cache layout": "K and V heads fill 32-bit words, head sizes multiples of 128 (tpu-inference)" if on_tpu else "nothing padded",
        "buckets": buckets if on_tpu else "none: a GPU step is as long as its tokens",
        "prefill": "one prompt alone, no cached prefix; attention not padded; logits of one position a chunk",
        "decode": f"at most {max_num_seqs} sequences a replica, all of this context, half-way through their answers; experts chosen evenly",
        "not counted": f"{2 * text['num_hidden_layers']} all-reduces a step when tp > 1, latencies, scheduling, sampling",
    }


def _check(text: dict[str, Any], devices: int, tp: int, numbers: dict[str, float], contexts: Sequence[int]) -> None:
    small = [f"{name} = {value}" for name, value in numbers.items() if value <= 0] + [f"context {n}" for n in contexts if n < 1]
    if small or not contexts:
        raise RecipeError(f"serving plan: {', '.join(small) or 'no context lengths'}: must be above 0")
    if numbers["memory_utilization"] > 1 or numbers["max_num_seqs"] > numbers["max_num_batched_tokens"]:
        raise RecipeError(f"serving plan: memory_utilization is at most 1 and max_num_seqs at most max_num_batched_tokens: {numbers}")
    works = [n for n in range(1, devices + 1) if devices % n == 0 and not _uneven(text, n)]
    if why := f"does not divide {devices} devices into replicas" if devices % tp else _uneven(text, tp):
        raise RecipeError(f"serving tp={tp} {why}. On {devices} devices these work: {', '.join(map(str, works))}")


def _uneven(text: dict[str, Any], tp: int) -> str | None:
    """What `tp` does not split, or for KV heads does not replicate, evenly."""
    for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
        if (text.get(name) or 0) % tp:
            return f"does not divide {name} {text[name]}"
    heads = next((layer.kv_heads for layer in layers(text) if layer.kv_heads % tp and tp % layer.kv_heads), None)
    return None if heads is None else f"neither splits nor evenly replicates {heads} KV heads"
