"""What jax reads from the environment, set before it is imported. Import this first.

A variable of jax's or XLA's may change the graphs behind the key's back (a matmul precision),
point jax at a device, or end the process (an unknown flag). The lowering and the runs on XLA:CPU
take none of them.
"""

import os

WITHHELD = ("JAX_", "XLA_")

for _name in [name for name in os.environ if name.startswith(WITHHELD)]:
    del os.environ[_name]
os.environ["JAX_PLATFORMS"] = "cpu"
