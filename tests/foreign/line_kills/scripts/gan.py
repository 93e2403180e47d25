"""A GAN: two wrapped modules, two optimizers, D frozen for G's half of a step, fixed noise for samples."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import samebits

STEPS, BATCH, NOISE = 30, 8, 6


def main() -> None:
    samebits.init()
    torch.manual_seed(9)
    torch.use_deterministic_algorithms(True)
    centers = torch.randn(4, 12)
    fixed = torch.randn(4, NOISE)
    generator = DistributedDataParallel(
        nn.Sequential(nn.Linear(NOISE, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))
    )
    critic = DistributedDataParallel(
        nn.Sequential(spectral_norm(nn.Linear(12, 24)), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(24, 1))
    )
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    state = samebits.elastic.TorchState(
        generator,
        of_generator,
        critic=critic,
        of_critic=of_critic,
        samples=[],
        rng="per_step",
        seed=9,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=8),
    )

    def critic_step(real: torch.Tensor) -> None:
        critic.requires_grad_(True)
        of_critic.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, NOISE))
        scores = critic(torch.cat([real, fake]))
        loss = F.softplus(-scores[:BATCH]).mean() + F.softplus(scores[BATCH:]).mean()
        loss.backward()
        of_critic.step()

    def generator_step() -> None:
        critic.requires_grad_(False)
        of_generator.zero_grad()
        fake = generator(torch.randn(BATCH, NOISE))
        loss = F.softplus(-critic.module(fake)).mean()
        loss.backward()
        of_generator.step()

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.completed_steps < STEPS:
            real = centers[torch.randint(4, (BATCH,))] + 0.1 * torch.randn(BATCH, 12)
            critic_step(real)
            generator_step()
            if (state.completed_steps + 1) % 10 == 0:
                generator.eval()
                with torch.no_grad():
                    sample = generator.module(fixed).mean().item()
                generator.train()
                state.samples = [*state.samples, sample]
            state.commit()

    train(state)
    digest = hashlib.sha256(repr(state.samples).encode())
    for one in (generator, critic):
        for value in one.state_dict().values():
            digest.update(value.numpy().tobytes())
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
