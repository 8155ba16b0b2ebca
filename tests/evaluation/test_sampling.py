"""Sampling over real sockets, against an endpoint that misbehaves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.errors import GemmaRayError, InputError, StageError
from gemma_ray.evaluation.benchmarks import Problem, load_problems
from gemma_ray.evaluation.config import EvalConfig
from gemma_ray.evaluation.samples import Sample
from gemma_ray.evaluation.sampling import draw_samples, problem_seed

FAST = 0.01


@pytest.fixture
def three(tiny_dataset: Path) -> list[Problem]:
    return load_problems(tiny_dataset)


def draw(problems: list[Problem], out: Path, url: str, model: str | None = "tiny", made_from: Any = None, **config: Any) -> list[Sample]:
    path = out / "samples.jsonl"
    return draw_samples(problems, EvalConfig(**{"n": 2, **config}), path, url=url, model=model, made_from=made_from, pause_s=FAST)[0]


def answer(completion: Callable[..., Any]) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    """As many answers as asked, each naming its seed, as vLLM numbers them."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return 200, completion(*(f"```verilog\nmodule TopModule; // {body['seed'] + i}\nendmodule\n```" for i in range(body["n"])))

    return reply


def test_one_request_a_problem_asks_for_all_samples(three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any) -> None:
    server = stand_in(answer(completion))
    samples = draw(three, tmp_path, server.url, n=3, system_prompt="Be brief.", temperature=0.7, top_p=0.9, max_tokens=99, seed=5)
    assert len(server.requests) == 3
    body = next(r for r in server.requests if r["messages"][-1]["content"] == three[1].prompt)
    assert body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": three[1].prompt}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 99,
        "n": 3,
        "seed": problem_seed(5, "Prob002_not"),
    }
    assert [(s.task_id, s.sample) for s in samples] == [(p.task_id, i) for p in three for i in range(3)]
    assert len({s.code for s in samples}) == 9
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"task_id", "sample", "prompt", "completion", "code", "finish_reason"}] * 9
    assert {line["finish_reason"] for line in lines} == {"stop"}


def test_a_problems_samples_do_not_depend_on_the_others(three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any) -> None:
    server = stand_in(answer(completion))
    alone = draw(three[2:], tmp_path / "alone", server.url)
    assert draw(three, tmp_path / "all", server.url)[4:] == alone
    assert draw(three[2:], tmp_path / "reseeded", server.url, seed=1) != alone


def test_an_endpoint_that_gives_fewer_answers_is_asked_for_the_rest(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any
) -> None:
    whole = draw(three, tmp_path / "whole", stand_in(answer(completion)).url, n=3)
    server = stand_in(lambda body, number: answer(completion)({**body, "n": 1}, number))
    assert draw(three, tmp_path / "one", server.url, n=3) == whole
    assert len(server.requests) == 9


def test_busy_failing_and_dropped_requests_are_tried_again(three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any) -> None:
    troubles = {1: 429, 2: 503, 3: 0, 4: 500, 5: 0}
    server = stand_in(
        lambda body, number: (troubles[number], {"error": "busy"}) if number in troubles else answer(completion)(body, number)
    )
    assert len(draw(three, tmp_path, server.url, concurrency=1)) == 6
    assert len(server.requests) == 3 + len(troubles)


def test_tries_end_with_an_error_and_what_was_drawn_is_gone_on_with(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any
) -> None:
    failing = stand_in(lambda body, n: answer(completion)(body, n) if n == 1 else (503, {"error": {"message": "no replica\nleft"}}))
    with pytest.raises(
        StageError, match=r"no answer from http.*/v1/chat/completions in 3 tries, last: HTTP 503: no replica left"
    ) as raised:
        draw(three, tmp_path, failing.url, made_from="weights", concurrency=1, retries=2)
    assert "\n" not in str(raised.value)
    assert len(failing.requests) == 1 + 3
    first = (tmp_path / "samples.jsonl").read_text()
    assert len(first.splitlines()) == 2
    server = stand_in(answer(completion))
    samples = draw(three, tmp_path, server.url, made_from="weights")
    assert len(server.requests) == 2 and len(samples) == 6
    assert first in (tmp_path / "samples.jsonl").read_text()


def test_a_finished_file_asks_nothing_and_another_temperature_asks_all(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any
) -> None:
    server = stand_in(answer(completion))
    samples = draw(three, tmp_path, server.url)
    assert draw(three, tmp_path, server.url) == samples and len(server.requests) == 3
    draw(three, tmp_path, server.url, temperature=0.1)
    assert len(server.requests) == 6
    assert len((tmp_path / "samples.1.jsonl").read_text().splitlines()) == 6


def test_requests_in_flight_are_bounded(three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any) -> None:
    lock, together, most = threading.Lock(), 0, 0
    pair = threading.Barrier(2)

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        pair.wait(10)  # passes only when two requests are here at once
        with lock:
            together -= 1
        return answer(completion)(body, number)

    four = [*three, Problem("Prob004_more", "another", "", "")]
    draw(four, tmp_path, stand_in(reply).url, concurrency=2)
    assert most == 2


def test_a_refused_prompt_costs_its_problem_and_is_asked_again_next_time(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any
) -> None:
    refusing = stand_in(
        lambda body, n: (
            (400, {"object": "error", "message": "maximum context length is 64 tokens"})
            if body["messages"][-1]["content"] == three[0].prompt
            else answer(completion)(body, n)
        )
    )
    samples = draw(three, tmp_path, refusing.url, made_from="weights")
    assert [(s.finish_reason, s.code) for s in samples[:2]] == [("refused", None)] * 2
    assert samples[0].error == "HTTP 400: maximum context length is 64 tokens"
    assert len(refusing.requests) == 3  # a refusal is not tried again
    willing = stand_in(answer(completion))
    assert all(s.finish_reason == "stop" for s in draw(three, tmp_path, willing.url, made_from="weights"))
    assert len(willing.requests) == 1


def test_samples_of_another_endpoint_or_model_are_not_gone_on_with(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any
) -> None:
    first, other = (stand_in(answer(completion), models=("tiny", "large")) for _ in range(2))
    draw(three, tmp_path, first.url)
    drawn = (tmp_path / "samples.jsonl").read_text()
    draw(three, tmp_path, f"{first.url}/v1/")
    assert len(first.requests) == 3
    draw(three, tmp_path, other.url)
    assert len(other.requests) == 3 and (tmp_path / "samples.1.jsonl").read_text() == drawn
    draw(three, tmp_path, other.url, model="large")
    assert len(other.requests) == 6


ODD_CHOICES = [
    "text",
    None,
    7,
    {"text": "of another protocol"},
    {"message": "text"},
    {"message": {"content": [{"type": "text", "text": "in a list"}]}},
]


@pytest.mark.parametrize("odd", ODD_CHOICES)
def test_an_answer_that_is_no_chat_message_costs_itself_unless_all_are(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any, odd: Any
) -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        status, document = answer(completion)(body, number)
        return status, {"choices": [odd, *document["choices"][1:]]} if number == 1 else document

    samples = draw(three, tmp_path, stand_in(reply).url, made_from="weights")
    bad = [s for s in samples if s.finish_reason == "refused"]
    assert len(bad) == 1 and bad[0].code is None and "no chat message with text" in str(bad[0].error)
    mended = stand_in(answer(completion))
    assert all(s.code for s in draw(three, tmp_path, mended.url, made_from="weights"))
    assert len(mended.requests) == 1
    with pytest.raises(StageError, match="refused every request, the first with no chat message with text"):
        draw(three, tmp_path / "all", stand_in(lambda body, n: (200, {"choices": [odd]})).url)


def test_a_message_without_text_is_an_answer_without_a_program(three: list[Problem], tmp_path: Path, stand_in: Any) -> None:
    choice = {"message": {"role": "assistant", "content": None}, "finish_reason": "length"}
    [first, *_] = draw(three, tmp_path, stand_in(lambda body, n: (200, {"choices": [choice]})).url)
    assert (first.completion, first.code, first.finish_reason) == ("", None, "length")


def test_half_a_surrogate_pair_anywhere_in_an_answer_is_written(three: list[Problem], tmp_path: Path, stand_in: Any) -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 1:
            return 400, {"error": {"message": "no \ud800"}}
        return 200, {"choices": [{"message": {"content": "yes \udfff"}, "finish_reason": "\udbff"}] * 2}

    samples = draw(three, tmp_path, stand_in(reply).url, concurrency=1)
    assert {s.error for s in samples if s.error} == {"HTTP 400: no ?"}
    assert {(s.completion, s.finish_reason) for s in samples if not s.error} == {("yes ?", "?")}
    assert draw(three, tmp_path, stand_in(reply, models=("\ud800",)).url, model=None)


@pytest.mark.parametrize("payload", [b"[" * 200_000, b"9" * 5000, b"\xff", b"<html>", b""])
def test_an_answer_that_is_no_json_is_told(three: list[Problem], tmp_path: Path, stand_in: Any, payload: bytes) -> None:
    with pytest.raises(StageError, match="is not an OpenAI-compatible endpoint: HTTP 200"):
        draw(three, tmp_path, stand_in(lambda body, n: (200, payload)).url)
    with pytest.raises(StageError, match="refused every request, the first with HTTP 400"):
        draw(three, tmp_path, stand_in(lambda body, n: (400, payload)).url)


def test_refusing_everything_is_an_error(three: list[Problem], tmp_path: Path, stand_in: Any) -> None:
    server = stand_in(lambda body, n: (400, {"error": {"message": "top_p must be in (0, 1]"}}))
    with pytest.raises(StageError, match="refused every request, the first with HTTP 400: top_p must be"):
        draw(three, tmp_path, server.url)


def test_a_wrong_model_name_is_answered_with_the_right_ones(three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any) -> None:
    server = stand_in(answer(completion), models=("base", "tuned"))
    with pytest.raises(InputError, match=r"has no model 'tiny'\. It has base, tuned"):
        draw(three, tmp_path, server.url)
    with pytest.raises(InputError, match="several models: choose one of base, tuned"):
        draw(three, tmp_path, server.url, model=None)
    assert server.requests == []
    only = stand_in(answer(completion), models=("only",))
    assert draw_samples(three, EvalConfig(n=1), tmp_path / "samples.jsonl", url=f"{only.url}/v1/", model=None)[1] == "only"


def test_an_endpoint_that_is_not_there_is_one_line(three: list[Problem], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError, match=r"no answer from http.*ConnectError.*gemma-ray serve") as raised:
        draw(three, tmp_path, url)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "somewhere", "http://127.0.0.1:99999", "http://127.0.0.1:-1"])
def test_what_is_no_url_is_refused(three: list[Problem], tmp_path: Path, url: str) -> None:
    with pytest.raises(GemmaRayError, match="not a"):
        draw(three, tmp_path, url)


def test_something_else_at_the_url_is_told_apart(three: list[Problem], tmp_path: Path, stand_in: Any) -> None:
    with pytest.raises(StageError, match="answered without choices"):
        draw(three, tmp_path, stand_in(lambda body, n: (200, {"hello": "world"})).url)
    with pytest.raises(InputError, match="no /v1/chat/completions"):
        draw(three, tmp_path, stand_in(lambda body, n: (404, {"detail": "Not Found"})).url)


def test_the_key_comes_from_the_named_variable(
    three: list[Problem], tmp_path: Path, stand_in: Any, completion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stand_in(answer(completion))
    monkeypatch.setenv("ENDPOINT_KEY", "open-sesame")
    draw(three, tmp_path, server.url, api_key_env="ENDPOINT_KEY")
    assert server.headers[0]["Authorization"] == "Bearer open-sesame"
    monkeypatch.delenv("ENDPOINT_KEY")
    with pytest.raises(InputError, match=r"eval\.api_key_env = 'ENDPOINT_KEY'"):
        draw(three, tmp_path, server.url, api_key_env="ENDPOINT_KEY")
    locked = stand_in(lambda body, n: (401, {"error": "who are you"}))
    with pytest.raises(InputError, match="refuses the key"):
        draw(three, tmp_path / "locked", locked.url)
