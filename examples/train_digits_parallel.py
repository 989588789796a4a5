"""Train on handwritten digits in several processes that share every batch.

Every rank has the same network and a part of each batch. `cunorm.SyncBatchNorm` normalizes
over the whole batch; gradients are added up over ranks, as in any data-parallel training.
Afterwards rank 0 trains alone, on whole batches and with `cunorm.BatchNorm`, to compare: the
losses differ by rounding, which training makes grow.

    mpiexec -n 2 python -m mpi4py examples/train_digits_parallel.py [--epochs 4]

(With -m mpi4py an error in one process ends them all.) It needs cunorm with its examples'
requirements, mpi4py and an MPI: pip install "cunorm[parallel]".
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from tqdm import tqdm
from train_digits import Momentum, accuracy, backward, cross_entropy, digits, forward, network

import cunorm


def synchronized(layers, communicator):
    """The same layers, their batch norms, which have the usual settings, over all ranks."""
    new = []
    for layer in layers:
        if isinstance(layer, cunorm.BatchNorm):
            state = layer.state_dict()
            layer = cunorm.SyncBatchNorm(layer.num_features, communicator=communicator)
            layer.load_state_dict(state)
        new.append(layer)
    return new


def add_up_gradients(layers, communicator):
    """Sums over all ranks in place of each rank's own gradients, in one message."""
    gradients = [
        (layer, name, layer.gradients[name]) for layer in layers for name in layer.parameters
    ]
    own = np.concatenate([gradient.reshape(-1) for _, _, gradient in gradients])
    total = np.empty_like(own)
    communicator.Allreduce(own, total)
    ends = np.cumsum([gradient.size for _, _, gradient in gradients])
    for (layer, name, gradient), values in zip(gradients, np.split(total, ends[:-1]), strict=True):
        layer.gradients[name] = values.reshape(gradient.shape)


def train(layers, images, labels, communicator, *, epochs, batch_size, learning_rate):
    """Train in place, every rank on its part of each batch; the loss of every step."""
    optimizer = Momentum(layers)
    order_of = np.random.default_rng(2)  # the same on all ranks
    size, rank = communicator.size, communicator.rank
    steps = len(images) // batch_size
    losses = []
    who = f"{size} ranks together" if size > 1 else "1 rank alone"
    with tqdm(total=epochs * steps, desc=who, unit="step", disable=rank > 0) as bar:
        for _ in range(epochs):
            order = order_of.permutation(len(images))[: steps * batch_size]
            for batch in order.reshape(steps, batch_size):
                mine = np.array_split(batch, size)[rank]
                loss, dscores = cross_entropy(forward(layers, images[mine]), labels[mine])
                share = len(mine) / batch_size  # of the batch, in its mean loss
                backward(layers, dscores * np.float32(share))
                add_up_gradients(layers, communicator)
                optimizer.step(learning_rate * (1 - len(losses) / (epochs * steps)))
                losses.append(communicator.allreduce(loss * share))
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update()
    return np.array(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4, choices=range(1, 1001), metavar="1..1000")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    options = vars(parser.parse_args())

    world = MPI.COMM_WORLD
    threads = max(1, cunorm.get_num_threads() // world.size)  # the ranks share the processors
    cunorm.set_num_threads(threads)
    threadpool_limits(threads)  # NumPy's matrix products
    (images, test_images), (labels, test_labels) = digits(np.random.default_rng(0))
    layers = synchronized(network(np.random.default_rng(1), batch_norm=True), world)
    if world.rank == 0:
        print(f"Training in {world.size} processes, then in one to compare, on the same batches.")
        print("The first step loads the kernels, or compiles them, which takes up to a minute.")
    together = train(layers, images, labels, world, **options)
    score = accuracy(layers, test_images, test_labels)  # inference: every rank for itself
    if world.rank > 0:
        return

    layers = network(np.random.default_rng(1), batch_norm=True)
    alone = train(layers, images, labels, MPI.COMM_SELF, **options)
    difference = np.abs(together - alone)
    print("Each step's loss. It differs by rounding (float32: 6e-8), which training makes grow.")
    print("step    loss together  loss alone  difference")
    for step in (0, 9, len(alone) // 4, len(alone) // 2, len(alone) - 1):
        print(
            f"{step + 1:4}    {together[step]:13.6f}  {alone[step]:10.6f}  {difference[step]:10.1e}"
        )
    print(f"test accuracy, {world.size} ranks together  {score:.2%}")
    print(f"test accuracy, alone            {accuracy(layers, test_images, test_labels):.2%}")
    print(f"largest difference of losses in the first 10 steps  {difference[:10].max():.1e}")


if __name__ == "__main__":
    main()
