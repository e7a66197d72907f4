"""Fixtures that several folders share; what they do is in modules with names."""

import signal
from collections.abc import Iterator

import pytest
from example_model import artifact_env, emulated_example, example

# A background job of a shell without job control starts with SIGINT ignored, and so would every
# process that the Ctrl-C tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["artifact_env", "emulated_example", "example"]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tensors so small that a second thread only costs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
