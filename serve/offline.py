"""`nxbucket generate`: one prompt through the bound programs, without a server."""

import os
from dataclasses import dataclass
from pathlib import Path

from nxbucket.serve.engine_args import check_platform, engine_args
from nxbucket.toolkit.errors import UsageError

COMMAND = "generate --prompt '...'"
"""What a hint calls it."""


@dataclass(frozen=True)
class Generation:
    text: str
    token_ids: list[int]
    finish_reason: str | None


def generate(
    path: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    *,
    emulate: bool = False,
    remote: str | None = None,
) -> Generation:
    """Greedy at temperature 0. Raises what `engine_args` does, and UsageError for a bad prompt."""
    arguments = engine_args(path, emulate=emulate, remote=remote, command=COMMAND)
    # In this process: a second one would import vLLM again, for one prompt.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Standard output is the answer's.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMClientError

    check_platform()
    llm = LLM(**arguments, disable_log_stats=True)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    try:
        (request,) = llm.generate([prompt], params, use_tqdm=False)
    except (VLLMClientError, ValueError) as err:
        raise UsageError(
            f"vLLM refuses the prompt: {err}", hint="shorten it, or raise max_model_len and compile"
        ) from err
    output = request.outputs[0]
    return Generation(output.text, list(output.token_ids), output.finish_reason)
