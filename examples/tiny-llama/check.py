"""Check that the model still knows its texts and answers by heart: python check.py

Greedy decoding with transformers, once with the weights widened to float32 and once in bfloat16.
`gap` is the smallest lead, in logits, of a right byte over the runner-up: a backend whose logits
are off by less than half of it gives the same bytes.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import EOS, HERE, UNKNOWN_ANSWER, load_answers, load_texts, render_question
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

TEXT_PROMPT_LEN = 20  # characters
HISTORY_LEN = 12  # messages
UNKNOWN_QUESTIONS = ("Hello", "What is the capital of France?", "Tell me a joke.")  # not trained on
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: str
    expected: str


def list_cases(tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    cases = []
    for name, text in load_texts().items():
        middle = text.index(" ", len(text) // 2) + 1
        for label, start in ((name, 0), (f"{name}, from the middle", middle)):
            cut = start + TEXT_PROMPT_LEN
            cases.append(Case(label, text[start:cut], text[cut:] + EOS))
    history: list[dict[str, str]] = []
    for turn, (question, answer) in enumerate(load_answers().items(), start=1):
        expected = f" {answer}{EOS}"
        cases.append(Case(question, render_question(question), expected))
        history = [*history[-HISTORY_LEN:], {"role": "user", "content": question}]
        chat = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        cases.append(Case(f"  as turn {turn} of a chat", chat, expected))
        history.append({"role": "assistant", "content": answer})
    for question in UNKNOWN_QUESTIONS:
        cases.append(Case(question, render_question(question), f" {UNKNOWN_ANSWER}{EOS}"))
    return cases


@torch.inference_mode()
def recall(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: Case
) -> tuple[int, int, float]:
    """Bytes right from the start, bytes expected, and the gap among the right ones."""
    prompt, expected = tokenizer.encode(case.prompt), tokenizer.encode(case.expected)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=len(expected),
        return_dict_in_generate=True,
        output_logits=True,
    )
    num_right, gap = 0, float("inf")
    for got, want, logits in zip(
        output.sequences[0, len(prompt) :], expected, output.logits, strict=False
    ):
        if got != want:
            break
        num_right += 1
        first, second = logits[0].float().topk(2).values.tolist()
        gap = min(gap, first - second)
    return num_right, len(expected), gap


def main() -> None:
    parser = argparse.ArgumentParser(description="Check what the tiny Llama knows by heart")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    cases = list_cases(tokenizer)
    num_wrong = 0
    print(f"{'prompt':54} {'float32':>12} {'gap':>6} {'bfloat16':>12} {'gap':>6}")
    loaded = [AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype) for dtype in DTYPES]
    for case in cases:
        line = f"{case.name:54}"
        for model in loaded:
            num_right, num_expected, gap = recall(model, tokenizer, case)
            num_wrong += num_right < num_expected
            line += f" {f'{num_right}/{num_expected}':>12} {gap:6.2f}"
        print(line)
    print(f"{len(cases)} prompts, {len(DTYPES)} dtypes: {num_wrong} answers not exact")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
