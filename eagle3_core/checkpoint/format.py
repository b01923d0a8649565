"""Checkpoints of drafters on disk: read in any known format, written in one.

`read_drafter_config` (config.py), `read_drafter_tensors` (tensors.py), `write_checkpoint` (write.py).
"""

from eagle3_core.checkpoint.tensors import read_drafter_tensors
from eagle3_core.checkpoint.write import write_checkpoint
from eagle3_core.contract.drafter_files import DrafterSource, read_drafter_config

__all__ = ["DrafterSource", "read_drafter_config", "read_drafter_tensors", "write_checkpoint"]
