import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tests run in parallel processes, and their tensors are small


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
