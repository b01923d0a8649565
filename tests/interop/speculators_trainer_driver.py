"""Runs inside the peer's own venv: speculators 0.9.0's own Trainer and logging on the CPU, with a few made-up batches.

usage: python speculators_trainer_driver.py CHECKPOINT SAVE_PATH GATES

Three epochs of four steps; the third step of epoch N waits for the file GATES/N.
"""

import functools
import select
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
from speculators import SpeculatorModel  # noqa: E402
from speculators.losses import eager  # noqa: E402
from speculators.train import distributed  # noqa: E402
from speculators.train.logger import setup_metric_logger, setup_root_logger  # noqa: E402
from speculators.train.trainer import Trainer, TrainerConfig  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402

checkpoint, save_path, gates = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
TOKENS, STEPS, EPOCHS, GATED_STEP = 32, 4, 3, 2

torch.set_num_threads(1)
torch.manual_seed(0)
# Its trainer takes a GPU for granted: the device is an ordinal, and each timed step waits for the device.
distributed._local_rank = "cpu"
torch.accelerator.synchronize = lambda: None


class Batches:
    """What the trainer asks of a data loader."""

    batch_sampler = None

    def __init__(self, gated: bool) -> None:
        self.gated = gated
        self.epoch = -1

    def __len__(self) -> int:
        return STEPS

    def __iter__(self):
        self.epoch += 1
        for step in range(STEPS):
            while self.gated and step == GATED_STEP and not (gates / str(self.epoch)).exists():
                select.select([], [], [], 0.02)
            hidden = model.config.transformer_layer_config.hidden_size
            yield {
                "hidden_states": torch.randn(1, TOKENS, 3 * hidden),
                "input_ids": torch.randint(0, 50, (1, TOKENS)),
                "document_ids": torch.zeros(1, TOKENS, dtype=torch.int64),
                "loss_mask": torch.ones(1, TOKENS, dtype=torch.int64),
                "position_ids": torch.arange(1, TOKENS + 1)[None],
                "verifier_last_hidden_states": torch.randn(1, TOKENS, hidden),
                "error_records": 0.0,
            }


model = SpeculatorModel.from_pretrained(checkpoint, dtype=torch.float32)
model.config.transformer_layer_config._attn_implementation = model._attn_impl = "sdpa"
model._create_mask_fn = create_mask
# The default loss is a Triton kernel, which needs a GPU; this is its own torch reference.
call = {"ttt_steps": 2, "ttt_step_loss_decay": 1.0, "loss_config": {"kl_div": (eager.kl_div_loss, 1.0)}}
forward = model.forward


@functools.wraps(forward)
def forward_without_bookkeeping(*, error_records: float, **batch):
    return forward(**batch)


model.forward = forward_without_bookkeeping
setup_root_logger()
setup_metric_logger([], None, save_path)
config = TrainerConfig(
    lr=1e-3,
    optimizer="muon",
    num_epochs=EPOCHS,
    save_path=str(save_path),
    train_call_kwargs=call,
    val_call_kwargs=call,
    hidden_states_dtype=torch.float32,
)
Trainer(model, config, Batches(gated=True), Batches(gated=False)).run_training()
