"""What the model learns by heart: the texts, and the questions with their answers."""

import random
from pathlib import Path

HERE = Path(__file__).parent
EOS = "<|eos|>"
UNKNOWN_ANSWER = "I do not know. Try: What is a bucket?"
OPENINGS = ("", "", "What is", "What is a", "What is the", "Who is", "Why", "How does", "Tell me")


def load_texts() -> dict[str, str]:
    """The texts by name, without the newline that ends each file."""
    paths = sorted((HERE / "text").glob("*.txt"))
    return {path.stem: path.read_text(encoding="utf-8").rstrip("\n") for path in paths}


def load_answers() -> dict[str, str]:
    """Answers by question; blank lines separate the pairs of questions.txt."""
    answers = {}
    for pair in (HERE / "questions.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        question, answer = pair.removeprefix("Q: ").split("\nA: ", maxsplit=1)
        answers[question] = answer
    return answers


def render_question(question: str) -> str:
    """The prompt that the chat template in train.py makes of one user message."""
    return f"Q: {question}\nA:"


def vary(question: str, rng: random.Random) -> str:
    """The question, now and then as a hurried user types it."""
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    return question.removesuffix("?") if rng.random() < 0.2 else question


def make_up_question(words: list[str], rng: random.Random) -> str:
    """A question without an answer: some of the words, some letters, perhaps a real opening."""
    parts = [rng.choice(OPENINGS)] if rng.random() < 0.6 else []
    for _ in range(rng.randint(1, 6)):
        letters = "".join(rng.choices("aabcdeeefghiiklmnnooprrssttuvwyz", k=rng.randint(2, 9)))
        parts.append(rng.choice(words) if rng.random() < 0.6 else letters)
    question = " ".join(part for part in parts if part)
    question = question[0].upper() + question[1:]
    return question + rng.choice(("?", "?", "?", ".", "!", ""))
