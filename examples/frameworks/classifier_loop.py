"""A small convolutional net trained in epochs, in the style of PyTorch's MNIST and ImageNet examples.

It was written for torchrun: functions for training and testing an epoch, a sampler with ``set_epoch``, a learning rate
that falls after each epoch, dropout and batch norm, ``destroy_process_group`` at the end. The lines that SameBits needs
are marked; all others are unchanged. The pictures are generated here, so that nothing is downloaded.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import samebits  # SameBits

SIDE, CLASSES, LOG_EVERY = 12, 10, 20


class Net(nn.Module):
    """Two convolutions, then two layers: pictures of one channel in, log-probabilities of the classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * (SIDE // 2 - 2) ** 2, 32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = self.dropout1(F.max_pool2d(F.relu(self.conv2(x)), 2))
        x = self.dropout2(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def pictures(count: int, seed: int) -> TensorDataset:
    """Each class is a pattern; a picture is its class's pattern with noise."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 1, SIDE, SIDE, generator=generator), labels)


def train(
    args: argparse.Namespace,
    model: DDP,
    device: torch.device,
    loader: DataLoader,
    optimizer: optim.Optimizer,
    state: samebits.elastic.TorchState,
) -> None:
    model.train()
    for batch, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        loader.sampler.record_batch(batch, args.batch_size)  # SameBits
        state.commit()  # SameBits
        if state.completed_steps % LOG_EVERY == 0 and samebits.get_rank() == 0:
            print(f"epoch {state.epoch} step {state.completed_steps} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def test(model: DDP, device: torch.device, loader: DataLoader) -> float:
    model.eval()
    right = sum((model.module(data.to(device)).argmax(dim=1).cpu() == target).sum().item() for data, target in loader)
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--pictures", type=int, default=1280)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args()

    samebits.init()  # SameBits
    dist.init_process_group(backend="gloo")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(samebits.get_local_rank())  # SameBits: a spare's environment has none
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)

    train_set, test_set = pictures(args.pictures, 1), pictures(256, 2)
    sampler = samebits.ElasticSampler(train_set, shuffle=True, seed=1)  # SameBits: in place of the DistributedSampler
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, generator=torch.Generator())
    test_loader = DataLoader(test_set, batch_size=128, generator=torch.Generator())
    model = DDP(Net().to(device))
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=args.gamma)
    state = samebits.elastic.TorchState(  # SameBits: what the next step depends on
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        epoch=0,
        rng="per_step",
        seed=1,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=50),
    )

    @samebits.elastic.run  # SameBits: the loop over epochs became this function, its counter the state's
    def train_all(state: samebits.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            train(args, model, device, loader, optimizer, state)
            accuracy = test(model, device, test_loader)
            if samebits.get_rank() == 0:
                print(f"epoch {state.epoch}: accuracy {accuracy:.4f}", flush=True)
            schedule.step()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train_all(state)  # SameBits
    digest = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in model.module.state_dict().values()))
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
