"""A small GPT-2 trained with Hugging Face's Trainer: its schedule, accumulation, evaluation and log.

The lines that SameBits needs are marked; all others are unchanged.
"""

import argparse
import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import samebits  # SameBits
from samebits.integrations.transformers import Trainer  # SameBits: instead of transformers' own

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--output", default="transformers")
args = parser.parse_args()

samebits.init()  # SameBits
set_seed(42)
torch.use_deterministic_algorithms(True)

starts = torch.randint(0, 40, (188, 1))
rows = (starts + torch.randint(1, 4, (188, 1)) * torch.arange(16)) % 64
examples = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=args.output,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=5,
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
    use_cpu=True,
    seed=42,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=examples[:156],
    eval_dataset=examples[156:],
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5),  # SameBits
)
trainer.train()
weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print(f"final step={trainer.state.global_step} sha256={hashlib.sha256(weights).hexdigest()}", flush=True)
