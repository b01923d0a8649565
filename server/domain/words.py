"""Which word was meant."""

import difflib
from collections.abc import Collection

OTHER_NAMES = {
    "verifier": (
        "model",
        "model_path",
        "model_name_or_path",
        "target_model",
        "target_model_path",
        "verifier_name_or_path",
    ),
    "conversations": ("data", "data_path", "dataset", "train_data_path"),
    "data_dir": ("data_path", "hidden_states", "hidden_states_path", "hidden_states_dir", "train_hidden_states_path"),
    "output_dir": ("save_path", "save_dir", "out_dir"),
    "epochs": ("num_epochs", "num_train_epochs"),
    "lr": ("learning_rate",),
    "grad_clip": ("max_grad_norm",),
    "max_seq_len": ("max_length", "max_seq_length", "seq_len", "total_seq_len", "model_max_length"),
    "ttt_steps": ("ttt_length",),
    "noise": ("noise_std",),
    "scheduler": ("lr_scheduler_type", "scheduler_type"),
    "warmup_ratio": ("warmup",),
    "num_workers": ("dataloader_num_workers",),
    "keep_last": ("save_total_limit",),
    "accumulate_packs": ("gradient_accumulation_steps",),
}
"""What other trainers call a parameter of ours."""


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word a misspelt one most resembles or stands for elsewhere, or None."""
    for ours, theirs in OTHER_NAMES.items():
        if word in theirs and ours in known:
            return ours
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
