"""vLLM's way in. Imported by every vLLM process in this environment: it imports nothing."""

import os

ACTIVATION_FLAG = "NXBUCKET_ACTIVE"


def register_platform() -> str | None:
    """Our platform's path, if the launcher set the flag: a plain `vllm serve` is left alone."""
    if os.environ.get(ACTIVATION_FLAG) == "1":
        return "nxbucket.serve.platform.NeuronPlatform"
    return None
