"""Fixtures that several folders share; what they do is in modules with names."""

import signal

from example_model import artifact_env, emulated_example, example

# A background job of a shell without job control starts with SIGINT ignored, and so would every
# process that the Ctrl-C tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["artifact_env", "emulated_example", "example"]
