"""What bound programs answer: CASES.json MODEL_YAML OUT.json. A case has a prompt and sampling."""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"


def main(cases_file: str, model_file: str, out_file: str) -> None:
    from nxbucket.serve.engine_args import engine_args

    arguments = engine_args(model_file)
    from vllm import LLM, SamplingParams

    has_tokenizer = (Path(arguments["model"]) / "tokenizer_config.json").exists()
    llm = LLM(**arguments, skip_tokenizer_init=not has_tokenizer)
    cases = json.loads(Path(cases_file).read_text())
    params = [SamplingParams(temperature=0, detokenize=False, **c["sampling"]) for c in cases]
    prompts = [{"prompt_token_ids": c["prompt_token_ids"]} for c in cases]
    outputs = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]
    answers = [{"token_ids": list(o.token_ids), "finish_reason": o.finish_reason} for o in outputs]
    Path(out_file).write_text(json.dumps(answers))


main(*sys.argv[1:])
