"""What clients send to one server: limits, odd requests, streams, and many at once."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import JSON_WITHOUT_SPACES, Server, nxbucket_serve, run_nxbucket

pytestmark = pytest.mark.engine

MODEL = "tiny-llama"
MAX_MODEL_LEN = 1024


@pytest.fixture(scope="module")
def server(
    example: Path, artifact_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("kinds") / "log"
    arguments = ("--api-key", "secret", "--enable-prompt-tokens-details", *JSON_WITHOUT_SPACES)
    with nxbucket_serve(example, log, *arguments, env=artifact_env) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(
        **{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **options}
    )


def gather(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """All at once; an error stands in its place."""

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="secret", max_retries=0
        ) as many:
            calls = (
                many.completions.create(**{"model": MODEL, "temperature": 0, **body})
                for body in bodies
            )
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(ask())


def test_a_question_from_the_training_set_gets_its_answer(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is a bucket?"}],
        temperature=0,
        max_tokens=200,
    )
    text = (chat.choices[0].message.content or "").strip()
    assert text.startswith("A bucket is a fixed shape that a program is compiled for.")
    assert chat.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same_as_one_answer(client: openai.OpenAI) -> None:
    whole = complete(client, "Four score", max_tokens=30).choices[0].text
    stream = complete(client, "Four score", max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole


# B24
def test_a_prompt_over_the_limit_is_refused_with_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        complete(client, "x" * 2000)
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        complete(client, "x" * 2000, stream=True)
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 2000}], max_tokens=8
        )


# B27: vLLM's rule is to cut max_tokens to what is left; never an empty 200.
def test_max_tokens_past_the_limit_ends_at_the_limit(client: openai.OpenAI) -> None:
    for max_tokens in (24, 256):
        options: dict[str, Any] = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
        answer = complete(client, "x" * 1000, **options)
        assert answer.usage.completion_tokens == 24
        assert answer.choices[0].finish_reason == "length"
        stream = list(complete(client, "x" * 1000, stream=True, **options))
        assert stream[-1].choices[0].finish_reason == "length"
        assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
        chat: Any = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x" * 994}],  # and "Q: ", "\nA:"
            temperature=0,
            **options,
        )
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == 1000
        assert chat.usage.completion_tokens == 24
        assert chat.choices[0].finish_reason == "length"


# B29: prompt logprobs are refused, not half answered.
def test_echo_with_logprobs_is_refused_with_a_sentence(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        complete(client, "abc", echo=True, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        complete(client, "abc", extra_body={"prompt_logprobs": 1})


# B30
def test_two_live_requests_with_one_client_given_id_both_get_their_text(server: Server) -> None:
    prompts = ["Four score and seven", "We the People of the"]
    bodies = [
        {"prompt": p, "max_tokens": 60, "extra_headers": {"X-Request-Id": "same"}} for p in prompts
    ]
    alone = [gather(server, [{"prompt": p, "max_tokens": 60}])[0].choices[0].text for p in prompts]
    assert [a.choices[0].text for a in gather(server, bodies)] == alone


# B31
def test_requests_of_one_token_take_no_decode_step(server: Server) -> None:
    before = decode_steps(server)
    answers = gather(server, [{"prompt": f"{i:050}", "max_tokens": 1} for i in range(40)])
    assert all(a.usage.completion_tokens == 1 for a in answers)
    assert decode_steps(server) == before


# B33
def test_the_chain_of_cached_blocks_survives_a_full_hit(client: openai.OpenAI) -> None:
    first = "B33 " + "abcdefgh" * 15 + "abcd"
    longer = first + "y" * 64
    assert len(first) == 128
    hits = [complete(client, p).usage.prompt_tokens_details for p in (first, first, longer, longer)]
    cached = [0 if h is None else h.cached_tokens or 0 for h in hits]
    assert cached[0] == 0
    assert cached[1] >= 96
    assert cached[2] >= 96
    assert cached[3] >= 160


# B35: blocks of an unfinished chunk never count as a hit.
def test_requests_that_share_a_prefix_and_arrive_together_do_not_disturb_each_other(
    server: Server,
) -> None:
    prefix = "B35 " + "in that sleep of death what dreams " * 9
    bodies = [{"prompt": prefix + tail, "max_tokens": 20} for tail in ("0123456789", "9876543210")]
    together = [a.choices[0].text for a in gather(server, bodies)]
    assert [gather(server, [b])[0].choices[0].text for b in bodies] == together


# B40, B41
def test_structured_outputs_are_valid_and_a_bad_grammar_hurts_only_its_request(
    server: Server,
) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 20]}}, "required": ["n"]}
    good = {
        "prompt": "n:",
        "max_tokens": 60,
        "extra_body": {"structured_outputs": {"json": schema}},
    }
    bad = [
        {"prompt": "n:", "extra_body": {"structured_outputs": {"json": '{"type": 12'}}},
        {"prompt": "n:", "extra_body": {"structured_outputs": {"regex": "(unclosed"}}},
    ]
    plain = {"prompt": "Four score", "max_tokens": 20}
    answers = gather(server, [good] * 8 + bad + [plain] * 4)
    for answer in answers[:8]:
        assert json.loads(answer.choices[0].text)["n"] in (1, 20)
    assert all(isinstance(a, openai.BadRequestError) for a in answers[8:10]), answers[8:10]
    assert len({a.choices[0].text for a in answers[10:]}) == 1


# B51, B98, B99
def test_the_end_token_obeys_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    question = "Q: What is a bucket?\nA:"
    ended = complete(client, question, max_tokens=200)
    assert ended.choices[0].finish_reason == "stop"
    length = ended.usage.completion_tokens
    longer = complete(client, question, max_tokens=200, extra_body={"min_tokens": length + 5})
    assert longer.usage.completion_tokens >= length + 5
    ignoring = complete(client, question, max_tokens=length + 10, extra_body={"ignore_eos": True})
    assert ignoring.usage.completion_tokens == length + 10


# B52
def test_stop_ids_outside_the_vocabulary_do_not_stop_the_engine(
    client: openai.OpenAI, server: Server
) -> None:
    body = {"min_tokens": 1, "stop_token_ids": [9999999, -1]}
    with contextlib.suppress(openai.BadRequestError):
        complete(client, "ping", extra_body=body)
    assert complete(client, "Four score", max_tokens=5).usage.completion_tokens == 5
    assert server.process.poll() is None


# B53
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_text(
    client: openai.OpenAI, stream: bool, include: bool
) -> None:
    options = {
        "stop": ["fathers brought"],
        "max_tokens": 100,
        "stream": stream,
        "extra_body": {"include_stop_str_in_output": include},
    }
    answer = complete(client, "Four score and seven years ago ", **options)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text == "our " + ("fathers brought" if include else "")


# B59, B62
@pytest.mark.parametrize("concurrent", [1, 2, 3, 4, 7])
def test_every_number_of_requests_at_once_gets_the_texts_of_single_ones(
    server: Server, concurrent: int
) -> None:
    prompts = ["Four score", "We the People", "'Twas brillig", "Shall I compare"]
    bodies = [
        {"prompt": prompts[i % 4] + "." * (i // 4), "max_tokens": 25} for i in range(concurrent)
    ]
    alone = [gather(server, [b])[0].choices[0].text for b in bodies]
    before = server.metrics()
    assert [a.choices[0].text for a in gather(server, bodies)] == alone
    after = server.metrics()
    if concurrent == 1:
        for size in (2, 4):
            name = f'nxbucket_program_executions_total{{program="decode_b{size}"}}'
            assert after.get(name, 0) == before.get(name, 0)
        padding = 'nxbucket_decode_padding_seqs_sum{bucket="1"}'
        assert after[padding] == 0


def test_a_client_that_goes_away_frees_its_seat(server: Server, client: openai.OpenAI) -> None:
    for _ in range(6):
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            headers={"Authorization": "Bearer secret"},
            json={"model": MODEL, "prompt": "a", "max_tokens": 900, "stream": True,
                  "ignore_eos": True},
        ) as response:  # fmt: skip
            next(response.iter_lines())
    assert complete(client, "Four score", max_tokens=5).usage.completion_tokens == 5


def test_what_is_bound_is_told_to_those_with_the_key_only(server: Server) -> None:
    assert server.get("/nxbucket/buckets")[0] == 401
    assert server.get("/nxbucket/buckets", {"Authorization": "Bearer wrong"})[0] == 401
    status, body = server.get("/nxbucket/buckets", {"Authorization": "Bearer secret"})
    assert status == 200
    programs = {p["name"]: p for p in json.loads(body)["programs"]}
    assert set(programs) == {
        "prefill_s32", "prefill_s64", "prefill_s128", "decode_b1", "decode_b2", "decode_b4",
    }  # fmt: skip
    assert programs["decode_b1"]["executions"] > 0


def test_metrics_show_padding_executions_state_and_held_back_requests(server: Server) -> None:
    samples = server.metrics()
    names = {name.partition("{")[0] for name in samples}
    assert {
        "nxbucket_prefill_padding_tokens_count",
        "nxbucket_decode_padding_seqs_count",
        "nxbucket_program_executions_total",
        "nxbucket_scheduler_state",
        "nxbucket_held_back_requests",
        "nxbucket_serve_compiles_total",
    } <= names
    assert samples["nxbucket_serve_compiles_total"] == 0
    # Each step is counted by its true size, too; every bucket of prefill is a bound.
    for size_metric, program in (
        ("nxbucket_prefill_chunk_tokens", "prefill"),
        ("nxbucket_decode_batch_seqs", "decode"),
    ):
        prefix = f'nxbucket_program_executions_total{{program="{program}_'
        steps = sum(value for name, value in samples.items() if name.startswith(prefix))
        assert samples[f"{size_metric}_count"] == steps > 0
    assert {f'nxbucket_prefill_chunk_tokens_bucket{{le="{b}.0"}}' for b in (32, 64, 128)} <= set(
        samples
    )


def test_drift_and_advise_read_this_server(
    server: Server, example: Path, artifact_env: dict[str, str]
) -> None:
    """By the server's own counters; whatever they say of so few requests."""
    lock = str(example.with_suffix(".lock"))
    done = run_nxbucket(
        "drift", "--metrics", server.url, "--lock", lock, "--json", env=artifact_env
    )
    assert done.returncode in (0, 4), done.stderr
    drift = json.loads(done.stdout)
    samples = server.metrics()
    for phase, metric in (
        ("prefill", "nxbucket_prefill_chunk_tokens"),
        ("decode", "nxbucket_decode_batch_seqs"),
    ):
        assert drift[phase]["steps"] == samples[f"{metric}_count"]
        now = drift[phase]["now"]
        share = 1 - samples[f"{metric}_sum"] / now["executed"]
        assert now["padding_share"] == pytest.approx(share, abs=1e-6)
        assert 0 <= drift[phase]["best"]["padding_share"] <= now["padding_share"]
    advised = run_nxbucket(
        "advise", str(example), "--metrics", server.url, "--json", env=artifact_env
    )
    assert advised.returncode == 0, advised.stderr
    assert json.loads(advised.stdout)["prefill"]["steps"] == drift["prefill"]["steps"]


def decode_steps(server: Server) -> float:
    prefix = 'nxbucket_program_executions_total{program="decode'
    return sum(value for name, value in server.metrics().items() if name.startswith(prefix))
