"""The work in FedJAX, as in its tutorials: its federated averaging over its ``for_each_client``.

    PYTHONPATH=benchmarks .venv-peers/bin/python -m peers.fedjax WORK --backend jit

FedJAX provides the algorithm (``algorithms.fed_avg.federated_averaging`` with its loop over clients, its weighted mean
and its server step), client data and batches (``ClientDataset``), the gradient of a ``Model``, and both optimisers. Two
of its backends:

- ``jit``, its default: clients one after another, each step a compiled program that uses all cores;
- ``pmap``: one client per device at a time; XLA's host is divided into two devices. All batches must have one shape, so
  FedJAX pads and masks a client's last batch.

Our code: the network in JAX (peers/jax_networks.py), and the order of examples. It follows the protocol of
peers/turns.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from peers.turns import serve
from peers.work import Work

DEVICES = 2


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--backend", choices=("jit", "pmap"), default="jit")
    arguments = parser.parse_args()
    if arguments.backend == "pmap":  # XLA reads it when it is first used
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

    import fedjax
    import jax
    import numpy as np
    import torch
    from fedjax.algorithms.fed_avg import federated_averaging

    from peers.jax_networks import logits

    jax.config.update("jax_pmap_no_rank_reduction", False)  # FedJAX's pmap backend expects what JAX did before 0.5
    work = Work.load(arguments.work)

    class InOrder(fedjax.ClientDataset):
        """A client's examples in the order of their use in a round."""

        def shuffle_repeat_batch(self, hparams: fedjax.ShuffleRepeatBatchHParams) -> Iterable[Mapping[str, np.ndarray]]:
            """Yield each example once, in the given order, unlike FedJAX, which fills the last batch from the first."""
            if arguments.backend == "pmap":
                return self.padded_batch(batch_size=hparams.batch_size)
            return self.batch(batch_size=hparams.batch_size)

    def loss(batch: Mapping[str, jax.Array], outputs: jax.Array) -> jax.Array:
        """Cross-entropy of each example."""
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(outputs), batch["y"][:, None], axis=1)[:, 0]

    weights = {name: tensor.numpy() for name, tensor in work.weights["model"].items()}
    model = fedjax.Model(
        init=lambda rng: weights,
        apply_for_train=lambda params, batch, rng: logits(params, batch["x"]),
        apply_for_eval=lambda params, batch: logits(params, batch["x"]),
        train_loss=loss,
        eval_metrics={},
    )
    data = [tuple(part.numpy() for part in work.data(client)) for client in range(len(work.offsets) - 1)]
    rng = jax.random.PRNGKey(0)  # nothing is drawn
    with fedjax.for_each_client_backend(arguments.backend):
        algorithm = federated_averaging(
            fedjax.model_grad(model),
            fedjax.optimizers.sgd(work.lr),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size),
        )
    state, done = algorithm.init(model.init(rng)), 0

    def clients(round_index: int) -> Iterable[tuple[int, InOrder, jax.Array]]:
        for client in work.cohorts[round_index]:
            order = work.order(round_index, client).numpy()
            x, y = (part[order] for part in data[client])
            yield client, InOrder({"x": x, "y": y.astype(np.int32)}), rng

    def run(rounds: int) -> None:
        nonlocal state, done
        for _ in range(rounds):
            state, _ = algorithm.apply(state, list(clients(done)))
            done += 1
        jax.block_until_ready(state.params)

    serve(run, lambda: {name: torch.from_numpy(np.array(value)) for name, value in state.params.items()})


if __name__ == "__main__":
    main()
