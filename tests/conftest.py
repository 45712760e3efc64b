"""What all tests share."""

import os

# Before torch is imported anywhere: with spinning OpenMP threads two busy processes on two cores slow each other down
# by a factor of ten and more; waiting threads that sleep cost next to nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
