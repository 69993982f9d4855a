"""A federation of several parts: data sets with clients, classes and a test set each, joined into one population.

The joined population knows who the clients are; their examples, and the test sets, are the parts' own. A client is called by its
part and its name there (``digits/george``), a class too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raydfl.data.names import Names
from raydfl.data.population import Part, Population


def join(populations: Mapping[str, Population]) -> Population:
    """Return the population of all parts, in the order given.

    Args:
        populations: by the parts' names; each with its examples.
    """
    parts: list[Part] = []
    for name, population in populations.items():
        parts.append(Part(name, sum(len(part.population) for part in parts), population))
    ids = Names.of(f"{part.name}/{client}" for part in parts for client in part.population.ids)
    profiles = [population.profile(index) for population in populations.values() for index in range(len(population))]
    examples = [population.num_examples(i) for population in populations.values() for i in range(len(population))]
    arrays = {
        "train/offsets": np.r_[0, np.cumsum(examples)].astype(np.int64),
        "groups_of": np.full(len(profiles), -1, np.int32),  # a client's group is asked of its part
        "noisy": np.array([profile["noisy"] for profile in profiles], bool),
        "label_errors": np.array([profile["label_errors"] for profile in profiles], bool),
        **{f"ids/{name}": array for name, array in ids.arrays.items()},
        **{f"groups/{name}": array for name, array in Names.of(()).arrays.items()},
    }
    lengths = {population.length for population in populations.values()}
    return Population(
        [f"{part.name}/{label}" for part in parts for label in part.population.classes],
        lengths.pop() if len(lengths) == 1 else None,
        (),
        arrays,
        [(f"{part.name}/{clip}", reason) for part in parts for clip, reason in part.population.skipped],
        [f"{part.name}: {message}" for part in parts for message in part.population.messages],
        parts[0].population.bands,
        parts=parts,
    )
