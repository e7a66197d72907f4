"""Stock vLLM's logprobs of every token after every prefix: SEQUENCES.json MODEL_DIR OUT.json DTYPE.

OUT: for each sequence, a row of the whole vocabulary for each token but the first.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"


def main(sequences_file: str, model_dir: str, out_file: str, dtype: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        model_dir,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        block_size=32,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_logprobs=-1,
    )
    assert type(current_platform).__name__ == "CpuPlatform", type(current_platform)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    sequences = json.loads(Path(sequences_file).read_text())
    outputs = llm.generate([{"prompt_token_ids": s} for s in sequences], params, use_tqdm=False)
    rows = [
        [[step[token].logprob for token in range(vocab)] for step in o.prompt_logprobs[1:]]
        for o in outputs
    ]
    Path(out_file).write_text(json.dumps(rows))


main(*sys.argv[1:])
