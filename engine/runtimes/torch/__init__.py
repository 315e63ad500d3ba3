"""The torch runtime: transformers' model definitions with our own module in place of theirs for the routed experts."""

import os

SPINS = 2000
"""How often an idle thread of torch looks for work before it sleeps: some microseconds."""

# By default torch's threads look for milliseconds after each operation, on the cores that our kernels' threads need
# then. Its OpenMP library reads this once, as torch is imported, which nothing does before this package.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
