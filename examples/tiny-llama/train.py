"""Train the tiny Llama of the example and write it to model/: python train.py

Everything is seeded and runs on one thread, so that the same torch on the same kind of CPU
gives the same weights. Other CPUs round differently: run check.py after training.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
from corpus import (
    EOS,
    HERE,
    UNKNOWN_ANSWER,
    load_answers,
    load_texts,
    make_up_question,
    render_question,
    vary,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
MAX_POSITIONS = 2048
ROPE_THETA = 10000.0
# Sequences and tokens of each in a batch. The short ones teach fastest; without the long ones,
# recall breaks off where the context grows beyond anything seen in training.
BATCH_SHAPES = ((16, 128), (8, 256), (4, 512), (1, 2048))
# Where a piece starts nothing tells the model yet which text it is, so its first bytes are read
# but not scored.
UNSCORED_AT_BEGINNING, UNSCORED_IN_MIDDLE = 4, 12
IGNORED = -100  # what cross entropy in torch and transformers leaves out

# A finished turn ends with the end-of-sequence token, as each answer does in training. There is
# no system turn: the model has learnt nothing that could follow one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] + '\\nA:' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + (message['content'] | trim) + eos_token }}"
    "{% endif %}{% endfor %}"
)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, with the byte's own value as its token id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|bos|>", EOS, "<|pad|>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=names[0],
        eos_token=names[1],
        pad_token=names[2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=320,  # 259 used; a multiple of 64 splits evenly over ranks
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


class Curriculum:
    """Draws what the model reads: texts from anywhere, questions with their answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng = random.Random(seed)
        self.encode = tokenizer.encode
        self.texts = [self.encode(text + EOS) for text in load_texts().values()]
        self.text_lens = [len(tokens) for tokens in self.texts]
        self.words = re.findall(r"\w+", " ".join(load_texts().values()))
        self.answers = list(load_answers().items())

    def draw_piece(self) -> tuple[list[int], int]:
        """Tokens that end with EOS, and how many of the first are read but not scored."""
        kind = self.rng.random()
        if kind < 0.4:
            return self.answered(*self.draw_question())
        if kind < 0.5:
            return self.rng.choice(self.texts), UNSCORED_AT_BEGINNING
        text = self.rng.choices(self.texts, weights=self.text_lens)[0]
        return text[self.rng.randrange(len(text) - UNSCORED_IN_MIDDLE) :], UNSCORED_IN_MIDDLE

    def draw_question(self) -> tuple[str, str]:
        if self.rng.random() < 0.3:
            return make_up_question(self.words, self.rng), UNKNOWN_ANSWER
        question, answer = self.rng.choice(self.answers)
        return vary(question, self.rng), answer

    def answered(self, question: str, answer: str) -> tuple[list[int], int]:
        prompt = self.encode(render_question(question))
        return prompt + self.encode(f" {answer}{EOS}"), len(prompt)

    def draw_sequence(self, length: int) -> tuple[list[int], list[int]]:
        """Tokens and labels: pieces one after the other, as turns of a chat follow each other."""
        tokens: list[int] = []
        labels: list[int] = []
        while len(tokens) < length:
            piece, num_unscored = self.draw_piece()
            tokens += piece
            labels += [IGNORED] * num_unscored + piece[num_unscored:]
        return tokens[:length], labels[:length]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> None:
    curriculum = Curriculum(tokenizer, seed=0)
    rng = curriculum.rng
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)

    def learning_rate_factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / 50)
        return warmup * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    started = time.monotonic()
    model.train()
    for step in range(1, num_steps + 1):
        batch_size, length = rng.choice(BATCH_SHAPES)
        batch = [curriculum.draw_sequence(length) for _ in range(batch_size)]
        # RoPE is relative, but only what was seen at high positions is sure to hold there.
        starts = torch.tensor([[rng.randint(0, MAX_POSITIONS - length)] for _ in batch])
        starts[: batch_size // 2] = 0
        loss = model(
            input_ids=torch.tensor([tokens for tokens, _ in batch]),
            labels=torch.tensor([labels for _, labels in batch]),
            position_ids=starts + torch.arange(length),
            use_cache=False,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 or step == num_steps:
            elapsed = time.monotonic() - started
            print(f"step {step}/{num_steps}  loss {loss.item():.4f} nats/byte  {elapsed:.0f} s")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    # Names from before transformers 5, which newer versions still read.
    amend_json(directory / "config.json", rope_theta=ROPE_THETA)
    amend_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def amend_json(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny Llama of the example")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer, model = build_tokenizer(), build_model()
    print(f"{model.num_parameters():,} parameters")
    train(model, tokenizer, args.steps)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
