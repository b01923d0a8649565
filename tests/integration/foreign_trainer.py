"""A plain Hugging Face training in a process of its own, as somebody may have written it.

usage: python foreign_trainer.py OUTPUT_DIR GATES

12 steps in 2 epochs; before the fifth it waits for the file GATES/4, before the ninth for GATES/8.
"""

import select
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

output_dir, gates = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, row):
        ids = torch.randint(0, 64, (12,))
        return {"input_ids": ids, "labels": ids}


class Gate(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        while state.global_step in (4, 8) and not (gates / str(state.global_step)).exists():
            select.select([], [], [], 0.02)


sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=64, **sizes)
arguments = TrainingArguments(
    output_dir=str(output_dir),
    num_train_epochs=2,
    per_device_train_batch_size=4,
    logging_steps=2,
    save_steps=6,
    eval_strategy="epoch",
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Gate()])
trainer.train()
