"""What stock vLLM and Hugging Face answer: PROMPTS.json MODEL_DIR OUT.json."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"


def main(prompts_file: str, model_dir: str, out_file: str) -> None:
    cases = json.loads(Path(prompts_file).read_text())
    answers = {"vllm": stock_vllm(cases, model_dir), "hf": hugging_face(cases, model_dir)}
    Path(out_file).write_text(json.dumps(answers))


def stock_vllm(cases: list[dict[str, Any]], model_dir: str) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    # Unchunked on purpose: a peer that does not share our chunking.
    llm = LLM(
        model_dir,
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=4,
        block_size=32,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    assert type(current_platform).__name__ == "CpuPlatform", type(current_platform)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=c["max_tokens"],
            ignore_eos=c["ignore_eos"],
            logprobs=5,
            presence_penalty=c.get("presence_penalty", 0),
            repetition_penalty=c.get("repetition_penalty", 1),
        )
        for c in cases
    ]
    prompts = [{"prompt_token_ids": c["prompt_token_ids"]} for c in cases]
    outputs = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]
    return [
        {
            "text": o.text,
            "token_ids": list(o.token_ids),
            "finish_reason": o.finish_reason,
            "top_logprobs": [
                {f"token_id:{token}": lp.logprob for token, lp in step.items()}
                for step in o.logprobs
            ],
        }
        for o in outputs
    ]


def hugging_face(cases: list[dict[str, Any]], model_dir: str) -> list[list[int]]:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    answers = []
    for case in cases:
        ids = torch.tensor([case["prompt_token_ids"]])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=case["max_tokens"],
            do_sample=False,
            eos_token_id=None if case["ignore_eos"] else eos,
            pad_token_id=0,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


main(*sys.argv[1:])
