"""config.json of models people serve, architecture fields only, as published.

The files are in `published_models/`; no weights, no text of anybody's. Parameter counts are those
of the published checkpoints (tied heads counted once), which the fields must add up to.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("published_models")


@dataclass(frozen=True)
class Published:
    """`refused`: a word of the sentence that answers it today; None where it is supported."""

    name: str
    hub_id: str
    parameters: int
    refused: str | None = None

    def copy_to(self, folder: Path) -> Path:
        """A model folder with this config.json."""
        folder.mkdir(parents=True)
        shutil.copy(FOLDER / self.name / "config.json", folder)
        return folder


PUBLISHED = [
    Published("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8_030_261_248),
    Published("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 1_235_814_400),
    Published("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
    Published("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
    Published("llama-2-7b", "meta-llama/Llama-2-7b-hf", 6_738_415_616),
    Published("codellama-7b", "codellama/CodeLlama-7b-hf", 6_738_546_688),
    Published("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", 134_515_008),
    Published("yi-6b", "01-ai/Yi-6B", 6_061_035_520),
    Published("deepseek-coder-1.3b", "deepseek-ai/deepseek-coder-1.3b-base", 1_346_471_936),
    Published("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", 7_248_023_552),
    Published("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 494_032_768),
    Published("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920),
]
