"""Thirty prompts over HTTP: the text of stock vLLM and of Hugging Face, and stock's logprobs."""

import asyncio
import json
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from example_model import variant
from servers import ROOT, Server, nxbucket_serve, run_script

from nxbucket.compile.host_cpu import host_march

pytestmark = pytest.mark.engine

NUM_PROMPTS = 30
BUDGET = 128
BUCKETS = (32, 64, 128)
TOLERANCE = 1e-4


def make_cases() -> list[dict[str, Any]]:
    """Half from the text the model knows by heart, half letters in no order it has ever seen."""
    rng = random.Random(7)
    texts = sorted((ROOT / "examples" / "tiny-llama" / "text").glob("*.txt"))
    known = "\n".join(path.read_text() for path in texts)
    cases = []
    for i in range(NUM_PROMPTS):
        length = rng.randint(BUDGET, 3 * BUDGET)
        if i % 2:
            start = rng.randrange(len(known) - length)
            prompt = known[start : start + length]
        else:
            prompt = "".join(rng.choices("etaoinshrdlu ETAOIN,.;:!?'-0123456789", k=length))
        cases.append(
            {
                "prompt": prompt,
                "prompt_token_ids": list(prompt.encode()),
                "max_tokens": rng.choice([1, 2, 7, 20, 45, 60]),
                "ignore_eos": bool(rng.randrange(2)),
            }
        )
    return cases


def penalised_case() -> dict[str, Any]:
    """B39: with async scheduling, penalties must not work on stale tokens."""
    prompt = "a a a a"
    return {
        "prompt": prompt,
        "prompt_token_ids": list(prompt.encode()),
        "max_tokens": 40,
        "ignore_eos": True,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.5,
    }


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return make_cases()


@pytest.fixture(scope="module")
def expected(
    cases: list[dict[str, Any]], example: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stock")
    (folder / "cases.json").write_text(json.dumps([*cases, penalised_case()]))
    run_script(
        "stock_reference.py",
        str(folder / "cases.json"),
        str(example.parent / "model"),
        str(folder / "out.json"),
    )
    answers: dict[str, Any] = json.loads((folder / "out.json").read_text())
    answers["penalised"] = answers["vllm"].pop()
    answers["hf"].pop()  # it has no presence penalty
    return answers


class Mode(NamedTuple):
    is_async: bool
    caches_prefixes: bool
    emulates: bool = False
    """A Neuron target's graphs on XLA:CPU, instead of target cpu's programs."""


MODES = {
    "sync, prefix cache": Mode(False, True),
    "sync, no prefix cache": Mode(False, False),
    "async, prefix cache": Mode(True, True),
    "async, no prefix cache": Mode(True, False),
    "sync, no prefix cache, emulated": Mode(False, False, True),
    "async, prefix cache, emulated": Mode(True, True, True),
}


@pytest.fixture(scope="module", params=MODES, ids=[m.replace(" ", "-") for m in MODES])
def served(
    request: pytest.FixtureRequest,
    artifact_env: dict[str, str],
    cases: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Mode, Server, list[Any]]]:
    """A server in one mode, and its answers to all the prompts at once."""
    mode = MODES[request.param]
    folder = tmp_path_factory.mktemp("server")
    model_file = variant(
        request.getfixturevalue("emulated_example" if mode.emulates else "example"),
        folder,
        async_scheduling=str(mode.is_async).lower(),
        enable_prefix_caching=str(mode.caches_prefixes).lower(),
    )
    args = ("--distributed-executor-backend", "mp") if mode.is_async else ()
    log = folder / "log"
    with nxbucket_serve(model_file, log, *args, env=artifact_env, emulate=mode.emulates) as server:
        yield mode, server, asyncio.run(ask_all(server, [*cases, penalised_case()]))


async def ask_all(server: Server, cases: list[dict[str, Any]]) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        return await asyncio.gather(
            *(
                client.completions.create(
                    model="tiny-llama",
                    prompt=case["prompt"],
                    max_tokens=case["max_tokens"],
                    temperature=0,
                    logprobs=5,
                    presence_penalty=case.get("presence_penalty", 0),
                    extra_body={
                        "ignore_eos": case["ignore_eos"],
                        "repetition_penalty": case.get("repetition_penalty", 1),
                        "return_tokens_as_token_ids": True,
                    },
                )
                for case in cases
            )
        )


def test_the_references_agree_and_say_something(
    cases: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    assert [a["token_ids"] for a in expected["vllm"]] == expected["hf"]
    tokens = {token for answer in expected["hf"] for token in answer}
    assert len(tokens) >= 30
    assert len({a["text"] for a in expected["vllm"]}) > NUM_PROMPTS // 2


def test_texts_and_ends_are_those_of_stock(
    served: tuple[Mode, Server, list[Any]], expected: dict[str, Any]
) -> None:
    _, _, answers = served
    for answer, stock, hf in zip(
        answers[:NUM_PROMPTS], expected["vllm"], expected["hf"], strict=True
    ):
        choice = answer.choices[0]
        assert choice.text == stock["text"]
        assert [int(t.removeprefix("token_id:")) for t in choice.logprobs.tokens] == hf
        assert choice.finish_reason == stock["finish_reason"]


def test_the_five_best_logprobs_of_every_step_are_those_of_stock(
    served: tuple[Mode, Server, list[Any]], expected: dict[str, Any]
) -> None:
    _, _, answers = served
    worst = 0.0
    for answer, stock in zip(answers[:NUM_PROMPTS], expected["vllm"], strict=True):
        steps = answer.choices[0].logprobs.top_logprobs
        assert len(steps) == len(stock["top_logprobs"])
        for ours, theirs in zip(steps, stock["top_logprobs"], strict=True):
            assert len(ours) >= 5
            # By rank, so that a tie for fifth is no difference, and by token for those in both.
            ranked = zip(sorted(ours.values())[-5:], sorted(theirs.values())[-5:], strict=True)
            shared = [(ours[token], theirs[token]) for token in ours.keys() & theirs.keys()]
            assert len(shared) >= 4
            worst = max(worst, *(abs(a - b) for a, b in [*ranked, *shared]))
    assert worst < TOLERANCE


def test_prefill_padding_per_bucket_is_what_the_requests_make_it(
    served: tuple[Mode, Server, list[Any]], cases: list[dict[str, Any]]
) -> None:
    mode, server, _ = served
    if mode.caches_prefixes:
        pytest.skip("how much is cached depends on the order in which requests meet")
    padding: dict[int, int] = dict.fromkeys(BUCKETS, 0)
    runs: dict[int, int] = dict.fromkeys(BUCKETS, 0)
    for case in [*cases, penalised_case()]:
        length = len(case["prompt_token_ids"])
        for start, end in pairwise([*range(0, length, BUDGET), length]):
            bucket = next(b for b in BUCKETS if b >= end - start)
            padding[bucket] += bucket - (end - start)
            runs[bucket] += 1
    samples = server.metrics()
    for bucket in BUCKETS:
        if runs[bucket]:
            name = f'{{bucket="{bucket}"}}'
            assert samples[f"nxbucket_prefill_padding_tokens_sum{name}"] == padding[bucket]
            assert samples[f"nxbucket_prefill_padding_tokens_count{name}"] == runs[bucket]
            program = f'nxbucket_program_executions_total{{program="prefill_s{bucket}"}}'
            assert samples[program] == runs[bucket]


def test_every_decode_row_is_a_token_or_counted_as_padding(
    served: tuple[Mode, Server, list[Any]], expected: dict[str, Any]
) -> None:
    mode, server, _ = served
    samples = server.metrics()
    rows = 0.0
    for size in (1, 2, 4):
        runs = samples.get(f'nxbucket_decode_padding_seqs_count{{bucket="{size}"}}', 0)
        padding = samples.get(f'nxbucket_decode_padding_seqs_sum{{bucket="{size}"}}', 0)
        rows += size * runs - padding
    # The first token of each answer comes out of its prefill.
    tokens = sum(len(a["token_ids"]) - 1 for a in [*expected["vllm"], expected["penalised"]])
    if not mode.is_async:
        assert rows == tokens
    else:
        # Async schedules one step ahead: a row may be in flight when its request ends at EOS.
        assert tokens <= rows <= tokens + NUM_PROMPTS + 1


# B39
def test_penalties_see_every_token_also_when_scheduling_is_async(
    served: tuple[Mode, Server, list[Any]], expected: dict[str, Any]
) -> None:
    _, _, answers = served
    assert answers[-1].choices[0].text == expected["penalised"]["text"]


def test_nothing_was_compiled(served: tuple[Mode, Server, list[Any]]) -> None:
    _, server, _ = served
    assert server.metrics()["nxbucket_serve_compiles_total"] == 0


def test_the_scheduler_is_the_one_of_the_flag(served: tuple[Mode, Server, list[Any]]) -> None:
    mode, server, _ = served
    name = "NeuronAsyncScheduler" if mode.is_async else "NeuronScheduler"
    assert f"nxbucket.serve.scheduler.{name}." in server.log


def test_logprobs_are_finite_numbers(served: tuple[Mode, Server, list[Any]]) -> None:
    _, _, answers = served
    for answer in answers:
        assert all(math.isfinite(p) for p in answer.choices[0].logprobs.token_logprobs)


def test_an_emulation_says_so(served: tuple[Mode, Server, list[Any]]) -> None:
    mode, server, _ = served
    status, body = server.get("/nxbucket/buckets")
    assert status == 200
    described = json.loads(body)
    assert described["emulated"] is mode.emulates
    assert described["target"] == ("hlo" if mode.emulates else f"cpu-{host_march()}")
    assert all(len(program["digest"]) == 64 for program in described["programs"])
    sentence = "emulating trn2 on XLA:CPU: correct, not fast; nothing here is a NEFF"
    assert (sentence in server.log) is mode.emulates
