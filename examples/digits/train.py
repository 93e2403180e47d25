"""Train a small convolutional net on handwritten digits in a job that survives kill -9: an example to copy.

Every process of the job, the scheduler included, runs this file; the environment determines its role. Start it with
``bash scripts/run.sh``, kill any process with ``kill -9``, recover with ``bash scripts/recover.sh``.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_digits
from model import DigitsNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits

PRINT_EVERY_STEPS = 20


def main() -> None:
    args = parse_arguments()

    # First: in the scheduler's process this call serves until the job is done, and exits.
    samebits.init()
    if not dist.is_initialized():  # with ENABLE_RECOVERY=0 the script makes its own process group
        dist.init_process_group()

    # The same bits on every run: one seed, and only operators that always sum in the same order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(samebits.get_local_rank())

    digits = load_digits(os.environ.get("DATA_PATH"))
    sampler = samebits.ElasticSampler(digits.train, shuffle=True, seed=args.seed)
    # Its own generator: a loader draws a number when it is iterated, which must not be one of the step's.
    loader = DataLoader(digits.train, batch_size=args.batch_size, sampler=sampler, generator=torch.Generator())
    model = DistributedDataParallel(DigitsNet(digits.image_size).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    # Everything a step depends on: when a worker is lost, all of it returns to the same commit.
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        epoch=0,
        step=0,
        rng="per_step",
        seed=args.seed,
        checkpoint=samebits.CheckpointConfig(
            save_checkpoint_steps=args.save_checkpoint_steps, keep_checkpoint_max=args.keep_checkpoint_max
        ),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        # Called again in the same process whenever a worker is lost; it resumes from the state alone.
        model.train()
        while state.step < args.steps:
            for batch, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                sampler.record_batch(batch, args.batch_size)
                state.step += 1
                state.commit()
                if state.step % PRINT_EVERY_STEPS == 0:
                    print(f"epoch {state.epoch} step {state.step} loss {loss.item():.4f}", flush=True)
                if state.step == args.steps:
                    return
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)

    loss, accuracy = evaluate(model.module, digits.held_out, device)
    print(
        f"final step={state.step} loss={loss:.4f} accuracy={accuracy:.4f} sha256={sha256_of(model.module)}", flush=True
    )


@torch.no_grad()
def evaluate(model: nn.Module, held_out: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Return mean loss and accuracy on held-out digits, without any communication."""
    model.eval()
    loss = right = 0.0
    for images, labels in DataLoader(held_out, batch_size=256):
        logits = model(images.to(device)).cpu()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(dim=1) == labels).sum().item()
    return loss / len(held_out), right / len(held_out)


def sha256_of(model: nn.Module) -> str:
    """Return a hash of the raw bytes of all parameters and buffers, in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional net on handwritten digits: scikit-learn's own, or the MNIST IDX files "
        "in the folder that DATA_PATH names. To start a whole job: bash scripts/run.sh",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=at_least_one, default=600, help="optimizer steps to train")
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="digits per worker and step")
    parser.add_argument(
        "--save-checkpoint-steps", type=at_least_one, default=50, help="optimizer steps between checkpoints"
    )
    parser.add_argument("--keep-checkpoint-max", type=at_least_one, default=5, help="checkpoints kept per worker")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, order of the digits and dropout")
    return parser.parse_args()


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    main()
