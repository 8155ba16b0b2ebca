"""The Grain source: order, state, hosts, and layouts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.artifacts import write_json
from gemma_ray.data.config import Layout
from gemma_ray.data.packing import LEAST_BUCKET, bucket_lengths, pack
from gemma_ray.data.records import pack_row
from gemma_ray.data.sharding import rows_of
from gemma_ray.data.shards import Manifest, Shard, read_manifest, shard_name, write_shard
from gemma_ray.data.source import batches, rows_of_batch
from gemma_ray.errors import DataError
from gemma_ray.models.templates import Tokens

LENGTH = 256


def write_data(folder: Path, lengths: list[int], layout: Layout, shards: int = 3) -> Path:
    """A data folder whose n-th example is n + 1, over and over."""
    folder.mkdir()
    documents = [Tokens(np.full(n, i + 1, np.int32), np.arange(n) >= n // 2) for i, n in enumerate(lengths)]
    described = []
    for i in range(shards):
        mine = documents[i::shards]
        rows = rows_of([len(d.ids) for d in mine], layout, LENGTH)
        name = shard_name(i, shards)
        sha256 = write_shard(folder / name, [pack_row([mine[j] for j in members]) for members, _ in rows])
        tokens = sum(len(d.ids) for d in mine)
        described.append(Shard(name, len(rows), sha256, len(mine), tokens, 0, dict(Counter(padded for _, padded in rows))))
    fields: dict[str, Any] = dict.fromkeys(("rows_read", "rows_kept", "tokens", "loss_tokens", "sequences"), 1)
    texts: dict[str, Any] = dict.fromkeys(("tokenizer", "source", "template"), "")
    counts: dict[str, Any] = {name: {} for name in ("rows_dropped", "example_lengths", "schemas", "decontaminated")}
    Manifest(**fields, **texts, **counts, padding_fraction=0.0, seq_len=LENGTH, layout=layout, probes=[], shards=described).write(folder)
    return folder


@pytest.fixture(scope="module", params=["padded", "packed", "buckets"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(0).integers(3, LENGTH, 100).tolist()
    return write_data(tmp_path_factory.mktemp("source") / request.param, lengths, request.param)


def first(data: Path, count: int, batch_size: int = 4, seed: int = 1, rows: list[int] | None = None) -> list[dict[str, np.ndarray]]:
    iterator = batches(data, batch_size=batch_size, seq_len=LENGTH, seed=seed, rows=rows)
    return [next(iterator) for _ in range(count)]


def examples(batch: dict[str, np.ndarray]) -> list[int]:
    """Numbers of a batch's examples."""
    return [
        int(tokens[segments == n][0])
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True)
        for n in range(1, segments.max() + 1)
    ]


def test_the_order_is_the_seeds_and_differs_by_epoch(data: Path) -> None:
    one, same, other = first(data, 60), first(data, 60), first(data, 60, seed=2)
    assert all(np.array_equal(a[key], b[key]) for a, b in zip(one, same, strict=True) for key in a)
    assert [examples(batch) for batch in one] != [examples(batch) for batch in other]
    assert one[0]["tokens"].dtype == np.int32


def test_padding_bears_no_loss_and_positions_restart(data: Path) -> None:
    for batch in first(data, 20):
        padding = batch["segments"] == 0
        assert not (batch["loss_mask"] & padding).any()
        assert not batch["tokens"][padding].any()
        for row in range(4):
            for n in range(1, batch["segments"][row].max() + 1):
                inside = batch["segments"][row] == n
                assert len(set(batch["tokens"][row][inside])) == 1  # one example, whole
                assert batch["positions"][row][inside].tolist() == list(range(inside.sum()))


@pytest.mark.parametrize("layout", ["padded", "packed", "buckets"])
def test_an_epoch_has_every_example_once(tmp_path: Path, layout: Layout) -> None:
    folder = write_data(tmp_path / "data", [100] * 40 + [200] * 40, layout)
    rows = sum(shard.rows for shard in read_manifest(folder).shards)
    assert rows == (61 if layout == "packed" else 80)  # pairs of 100 share a row of 256: of 14, 13 and 13 in a shard
    epochs = [
        Counter(number for batch in first(folder, 2 * rows, batch_size=1)[part] for number in examples(batch))
        for part in (slice(rows), slice(rows, None))
    ]
    assert epochs[0] == epochs[1] == Counter(range(1, 81))


def test_bucket_batches_have_one_length_of_few(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data", [100] * 30 + [200] * 30, "buckets")
    shapes = Counter(batch["tokens"].shape for batch in first(folder, 15))
    assert set(shapes) == {(4, 128), (4, 256)}


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_restored_state_continues_exactly_on_any_number_of_hosts(data: Path, hosts: int) -> None:
    """What one host left off, several go on with: together they read the batches that one would have read."""
    iterator = batches(data, batch_size=4, seq_len=LENGTH, seed=3)
    for _ in range(7):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(30)]
    share = 4 // hosts
    parts = []
    for host in range(hosts):
        mine = batches(data, batch_size=4, seq_len=LENGTH, seed=3, rows=list(range(host * share, (host + 1) * share)))
        mine.set_state(state)
        parts.append([next(mine) for _ in range(30)])
    for number, whole in enumerate(expected):
        for key, values in whole.items():
            assert np.array_equal(np.concatenate([part[number][key] for part in parts]), values)


def test_rows_longer_than_the_recipe_are_refused(data: Path) -> None:
    with pytest.raises(DataError, match="max_seq_len"):
        batches(data, batch_size=4, seq_len=64, seed=0)


def test_rows_of_a_rare_length_go_with_longer_ones(tmp_path: Path) -> None:
    """None is left out for good: three rows of one length and three of another make a batch of the longer and wait by turns."""
    folder = write_data(tmp_path / "data", [100] * 3 + [200] * 3, "buckets", shards=1)
    found = first(folder, 20)
    assert {batch["tokens"].shape for batch in found} == {(4, 256)}
    assert {number for batch in found for number in examples(batch)} == set(range(1, 7))
    with pytest.raises(DataError, match=r"6 rows are not 7 for a batch; lower train\.batch_size"):
        batches(folder, batch_size=7, seq_len=LENGTH, seed=0)


def test_packing_by_hand() -> None:
    assert pack([5, 7, 3, 5, 10], 10) == [[0, 3], [1, 2], [4]]
    assert pack([], 10) == []
    assert pack([10, 10], 10) == [[0], [1]]


@pytest.mark.parametrize("seed", range(3))
def test_packing_of_lengths_like_codev_r1s_wastes_at_most_a_twentieth(seed: int) -> None:
    """A log-normal with mean 922 whose 99th percentile is 2,553, cut at 3,072 tokens, as the paper reports (arXiv 2605.25645)."""
    sigma = 0.5178  # of 922 = exp(mu + sigma²/2) and 2553 = exp(mu + 2.3263 sigma)
    lengths = np.random.default_rng(seed).lognormal(np.log(922) - sigma**2 / 2, sigma, 4096).astype(int)
    lengths = lengths[lengths <= 3072]
    assert lengths.mean() == pytest.approx(922, rel=0.05)
    assert np.percentile(lengths, 99) == pytest.approx(2553, rel=0.1)
    rows = pack(lengths.tolist(), 3072)
    assert sorted(i for members in rows for i in members) == list(range(len(lengths)))
    assert all(lengths[members].sum() <= 3072 for members in rows)
    assert 1 - lengths.sum() / (len(rows) * 3072) < 0.05
    buckets = sum(next(b for b in bucket_lengths(3072) if b >= n) for n in lengths)
    assert 1 - lengths.sum() / buckets < 0.2


def test_buckets_are_multiples_of_128_and_end_with_the_row() -> None:
    assert bucket_lengths(3072) == (384, 768, 1152, 1536, 1920, 2304, 2688, 3072)
    assert bucket_lengths(200) == (LEAST_BUCKET, 200)
    assert bucket_lengths(100) == (100,)


def test_a_folder_that_is_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prepared data"):
        batches(tmp_path, batch_size=1, seq_len=16, seed=0)
    write_json(tmp_path / "manifest.json", {})
    with pytest.raises(DataError, match="not a manifest"):
        batches(tmp_path, batch_size=1, seq_len=16, seed=0)


def test_a_shard_without_rows_is_passed_over_on_every_host(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data", [20, 30, 40], "padded", shards=5)
    seen = [number for batch in first(folder, 3, batch_size=2) for number in examples(batch)]
    assert sorted(set(seen)) == [1, 2, 3]
    halves = [first(folder, 3, batch_size=2, rows=[row]) for row in range(2)]
    assert [number for pair in zip(*halves, strict=True) for batch in pair for number in examples(batch)] == seen
    assert (
        len(
            {
                *rows_of_batch(folder, 0, batch_size=2, seq_len=LENGTH, seed=1),
                *rows_of_batch(folder, 1, batch_size=1, seq_len=LENGTH, seed=1),
            }
        )
        >= 2
    )
