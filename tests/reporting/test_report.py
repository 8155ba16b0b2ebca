import html
import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest

from gemma_ray.errors import InputError
from gemma_ray.reporting.page import report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The page as a reader has it: text, tags, attributes, and whether every element closes."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def render(tmp_path, *runs) -> Page:
    page = Page(report(list(runs), tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not page.open
    return page


def change(path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_full_run_shows_every_section_with_the_numbers_of_its_artifacts(tmp_path, make_run):
    run = make_run()
    page = render(tmp_path, run)
    anchors = {a.get("id") for a in page.all("section")}
    assert {"training", "data", "quality", "verification", "latency", "cost", "stages", "artifacts", "versions", "recipe"} <= anchors
    assert "not run" not in page.text
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    before, after = (json.loads((run / name / "summary.json").read_text()) for name in ("eval-base", "eval"))
    cell = json.loads((run / "bench" / "512_4.json").read_text())
    for shown in (
        f"{last['loss']:.4f}",
        f"{100 * before['pass@1']['value']:.1f} % → {100 * after['pass@1']['value']:.1f} %",
        f"{100 * after['pass@5']['value']:.1f} %",
        str(after["verdicts"]["mismatch"]),
        "3.1e-05",
        "2,048",
        "too long",
        f"{100 * 231456 / 412345:.1f} %",
        f"{cell['output_tokens_per_s']:,.1f}",
        "5 min 12 s",
        "0.10.2",
        "built-in:gemma4-tiny",
        "checkpoints/200/",
    ):
        assert shown in page.text, shown


def test_the_page_loads_nothing_and_plots_are_named(tmp_path, make_run):
    source = report([make_run()], tmp_path / "r.html").read_text()
    page = Page(source)
    loaded = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "xlink:href", "data", "srcset") and v]
    assert all(v.startswith(("#", "data:,")) for v in loaded)
    assert not page.all("script") and "@import" not in source and not re.search(r"url\((?!#)", source)
    plots = [attrs for attrs in page.all("svg") if attrs.get("role") == "img"]
    assert len(plots) == 3 + 2 + 9
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for attrs in plots:
        assert set((attrs["aria-labelledby"] or "").split()) <= set(ids)
    referenced = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', source))
    assert referenced and referenced <= set(ids)


def test_plots_follow_the_theme(tmp_path, make_run):
    source = report([make_run()], tmp_path / "r.html").read_text()
    drawings = "".join(re.findall(r"<svg viewBox.*?</svg>", source, re.S))
    assert "var(--s1)" in drawings and "var(--ink)" in drawings
    assert not re.findall(r"(?:fill|stroke): #", drawings)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", source))
    assert used <= set(re.findall(r"(--[a-z0-9-]+):", source))


def test_the_same_runs_give_the_same_bytes(tmp_path, make_run):
    run = make_run()
    assert report([run], tmp_path / "a.html").read_bytes() == report([run], tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize(
    "kept", ["metrics.jsonl", "data/manifest.json", "verify.json", "eval/summary.json", "bench/128_inf.json", "timings.json", "recipe.yaml"]
)
def test_a_run_with_one_artifact_says_not_run_for_the_rest(tmp_path, make_run, kept):
    run = make_run()
    text = (run / kept).read_text()
    partial = tmp_path / "partial"
    (partial / kept).parent.mkdir(parents=True)
    (partial / kept).write_text(text)
    page = render(tmp_path, partial)
    assert page.text.count("not run") >= 6


def test_runs_stand_side_by_side_and_their_recipes_differences_are_named(tmp_path, make_run):
    page = render(tmp_path, make_run("one"), make_run("two", seed=1))
    assert "A: one" in page.text and "B: two" in page.text
    assert re.search(r"lora\.rank 16 32", page.text)
    assert "lora.alpha" not in page.text.split("recipe.yaml")[0]
    assert len([a for a in page.all("section") if a.get("class") == "summary"]) == 2


def test_a_run_beside_a_partial_one_keeps_its_column(tmp_path, make_run):
    full = make_run("full")
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "timings.json").write_text('{"stages": {"train": 7.0}, "total_s": 7.0}')
    page = render(tmp_path, full, partial)
    assert re.search(r"rows read 2,048 not run", page.text)
    assert re.search(r"train 5 min 12 s 7\.0 s", page.text)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, make_run):
    page = render(tmp_path, make_run("mon/run"), make_run("tue/run"))
    assert "A: mon/run" in page.text and "B: tue/run" in page.text


def test_strings_from_artifacts_are_escaped(tmp_path, make_run):
    evil = "<script>alert(1)</script>\"'&{{ 7*7 }}$\\frac{"
    run = make_run(evil.replace("/", "_"))
    (run / "recipe.yaml").write_text(json.dumps({"model": {"source": evil}, "cost": {"usd_per_hour": 1, "source": evil}}))
    change(run / "eval" / "summary.json", dataset=evil, simulator=evil, model=evil, set_aside=[evil], verdicts={evil: 3, "pass": 2})
    change(run / "data" / "manifest.json", rows_dropped={evil: 1})
    change(run / "versions.json", **{evil: evil})
    change(run / "timings.json", stages={evil: 1.0})
    (run / evil.replace("/", "_")).write_text("x")
    source = report([run, make_run("other")], tmp_path / "r.html").read_text()
    page = Page(source)
    assert not page.all("script") and "<script" not in source
    assert html.unescape(source).count(evil) >= 8
    assert "{{ 7*7 }}" in source


def test_an_emulated_slice_is_said_aloud(tmp_path, make_run):
    emulated, real = make_run("emulated"), make_run("real", emulate=False)
    assert "say nothing about a TPU" in render(tmp_path, emulated).text
    assert "say nothing about a TPU" not in render(tmp_path, real).text


def test_cost_is_price_times_time_with_both_beside_it(tmp_path, make_run):
    page = render(tmp_path, make_run(price=36.0, emulate=False))
    assert re.search(r"train \$36\.00/h × 312\.4 s \$3\.12", page.text)  # 36 $/h is a cent a second
    assert re.search(r"total \$36\.00/h × 673\.2 s \$6\.73", page.text)
    assert "price list, May 2026" in page.text
    best = 32 * 4 * 0.95 / 1.1
    assert f"{best:,.1f} output tokens/s" in page.text and f"${0.01 / best * 1e6:,.2f}" in page.text


def test_without_a_price_there_is_no_money(tmp_path, make_run):
    page = render(tmp_path, make_run())
    assert "no price in the recipe" in page.text and "$" not in page.text


def test_a_rise_within_the_intervals_is_not_called_one(tmp_path, make_run):
    run = make_run()
    change(run / "eval-base" / "summary.json", **{"pass@1": {"value": 0.50, "ci95": [0.4, 0.6]}})
    change(run / "eval" / "summary.json", **{"pass@1": {"value": 0.55, "ci95": [0.45, 0.65]}})
    text = render(tmp_path, run).text
    assert "moved pass@1 from 50.0 % to 55.0 %" in text.replace("\xa0", " ") and "intervals overlap" in text and "raised" not in text
    change(run / "eval" / "summary.json", **{"pass@1": {"value": 0.75, "ci95": [0.65, 0.85]}})
    assert "raised pass@1" in render(tmp_path, run).text


def test_before_and_after_on_different_problems_are_not_compared(tmp_path, make_run):
    run = make_run()
    change(run / "eval-base" / "summary.json", problems=12)
    text = render(tmp_path, run).text
    assert "not measured alike" in text and "raised" not in text


def test_pass_at_5_may_be_null(tmp_path, make_run):
    run = make_run()
    for name in ("eval", "eval-base"):
        change(run / name / "summary.json", **{"pass@5": None})
    assert "pass@5" not in render(tmp_path, run).text


def test_percentiles_with_too_few_samples_are_marked(tmp_path, make_run):
    few, many = render(tmp_path, make_run("few", requests=30)).text, render(tmp_path, make_run("many", requests=120)).text
    assert "* too few samples" in few and "Hollow marks" in few
    assert "too few samples" not in many


def test_a_bench_where_every_request_failed_is_a_row_and_no_point(tmp_path, make_run):
    run = make_run()
    nothing = {"mean": None, "p50": None, "p90": None, "p99": None, "samples": 0, "too_few": ["p50", "p90", "p99"]}
    for path in (run / "bench").iterdir():
        change(path, completed=0, failed=120, output_tokens_per_s=0.0, ttft_ms=nothing, tpot_ms=nothing, itl_ms=nothing, e2e_ms=nothing)
    page = render(tmp_path, run)
    assert "0/120" in page.text
    assert len([a for a in page.all("svg") if a.get("role") == "img"]) == 3 + 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n'),
        ("metrics.jsonl", '{"step": "first"}\n'),
        ("data/manifest.json", '{"rows_read": 1}'),
        ("verify.json", ""),
        ("eval/summary.json", '{"problems": 3, "samples_per_problem": 5, "pass@1": {"ci95": [0, 1]}}'),
        ("eval/results.jsonl", "nonsense\n"),
        ("bench/128_1.json", "[1, 2]"),
        ("timings.json", '{"stages": {"train": "long"}}'),
        ("versions.json", "[]"),
        ("recipe.yaml", "model: [unclosed"),
        ("recipe.yaml", "just words"),
        ("recipe.yaml", "[" * 5_000),
        ("recipe.yaml", "a: &a {b: *a}"),
        ("timings.json", '{"stages": {"train": Infinity}}'),
        ("timings.json", '{"stages": {"train": 1.0}, "total_s": NaN}'),
        ("metrics.jsonl", '{"step": 1, "loss": 2.0, "step_s": Infinity}\n'),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("versions.json", "[" * 100_000),
        ("versions.json", '{"a": ' * 500 + "1" + "}" * 500),
        ("verify.json", "[" * 100_000),
        ("eval/summary.json", '{"problems": 3, "samples_per_problem": 5, "pass@1": {"value": Infinity}}'),
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_artifact_is_one_line_that_names_it(tmp_path, make_run, name, content):
    run = make_run()
    (run / name).write_text(content)
    with pytest.raises(InputError) as e:
        report([run], tmp_path / "r.html")
    assert str(run / name) in str(e.value) and "damaged" in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "r.html").exists()


def test_an_infinite_latency_is_damage_and_an_infinite_loss_is_not(tmp_path, make_run):
    run = make_run(steps=2)
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n{"step": 3, "loss": NaN, "grad_norm": Infinity}\n'
    )
    assert "nan" in render(tmp_path, run).text
    cell = json.loads((run / "bench" / "128_1.json").read_text())
    change(run / "bench" / "128_1.json", ttft_ms={**cell["ttft_ms"], "p50": float("inf")})
    with pytest.raises(InputError, match=r"128_1\.json is damaged: ttft_ms\.p50"):
        report([run], tmp_path / "r.html")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "timings.json", "eval/summary.json", "eval/results.jsonl", "bench/128_1.json", "recipe.yaml"]
)
def test_a_folder_in_place_of_an_artifact_is_damage(tmp_path, make_run, name):
    run = make_run()
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(InputError, match=f"{run / name} is damaged: not a file"):
        report([run], tmp_path / "r.html")


@pytest.mark.parametrize("name", ["data", "eval", "bench"])
def test_a_file_in_place_of_a_folder_is_damage(tmp_path, make_run, name):
    run = make_run()
    shutil.rmtree(run / name)
    (run / name).write_text("")
    with pytest.raises(InputError, match=f"{run / name} is damaged: not a folder"):
        report([run], tmp_path / "r.html")


@pytest.mark.parametrize("out", ["/proc/nope/x.html", "x" * 300 + ".html", "x" * 250, "timings.json/x.html"])
def test_a_page_that_cannot_be_written_is_refused(tmp_path, make_run, out):
    run = make_run(steps=2)
    with pytest.raises(InputError, match=r"cannot be written \(.*\); name another file"):
        report([run], run / out)


def test_a_run_with_an_impossible_name_is_refused(tmp_path):
    with pytest.raises(InputError, match="File name too long"):
        report([tmp_path / ("x" * 300)], tmp_path / "r.html")


def test_a_file_whose_name_is_no_text_is_listed(tmp_path, make_run):
    run = make_run(steps=2)
    (run / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert "caf?.txt" in render(tmp_path, run).text


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path, make_run):
    run = make_run(steps=50)
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"step": 51, "lo')
    assert re.search(r"steps 50\b", render(tmp_path, run).text)


def test_folders_that_are_no_runs_are_refused(tmp_path, make_run):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hello")
    run = make_run()
    for folders, message in (
        ([tmp_path / "missing"], "no run folder"),
        ([tmp_path / "empty"], "no artifact"),
        ([run, tmp_path / "other"], "no artifact"),
        ([run, run], "named twice"),
        ([], "at least one"),
    ):
        with pytest.raises(InputError, match=message):
            report(folders, tmp_path / "r.html")
    with pytest.raises(InputError, match="is a folder"):
        report([run], tmp_path)


def test_the_report_inside_a_run_does_not_list_itself(tmp_path, make_run):
    run = make_run()
    first = report([run], run / "report.html").read_bytes()
    assert report([run], run / "report.html").read_bytes() == first
    assert b"report.html" not in first
