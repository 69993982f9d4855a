"""A federation of several parts: data sets with clients, classes and a test set each, joined into one population.

The joined population knows who the clients are; their examples, and the test sets, are the parts' own. A client is called by its
part and its name there (``digits/george``), a class too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from raydfl.core.settings import FIRST_VIEW
from raydfl.data.client_ids import ClientIds
from raydfl.data.population import Part, Population, StoredView
from raydfl.data.tables import Tables, encode, no_clips


def join_parts(populations: Mapping[str, Population]) -> Population:
    """Return the population of all parts, in the order given.

    Args:
        populations: by the parts' names; a single part without a name is the federation.
    """
    if "" in populations:
        return populations[""]
    firsts = np.cumsum([0, *(len(population) for population in populations.values())]).tolist()
    parts = [Part(name, first, own) for first, (name, own) in zip(firsts, populations.items(), strict=False)]
    ids = ClientIds.from_strings(f"{part.name}/{client}" for part in parts for client in part.population.ids)
    sizes = np.concatenate([part.population.sizes() for part in parts]).astype(np.int64)
    places = list(dict.fromkeys(place for part in parts for place in part.population.places))
    codes = [
        np.array([places.index(place) for place in part.population.places])[part.population.place_codes]
        for part in parts
    ]
    place = {"place": encode(np.concatenate(codes).astype(np.int32), places)} if any(places) else {}
    first = [population.views[FIRST_VIEW] for population in populations.values()]
    lengths = {view.length for view in first}
    return Population(
        Tables(no_clips(), pa.record_batch({**ids.columns(), **place, "examples": pa.array(sizes)})),
        [f"{part.name}/{label}" for part in parts for label in part.population.classes],
        {FIRST_VIEW: StoredView(lengths.pop() if len(lengths) == 1 else None, bands=first[0].bands)},
        skipped=[(f"{part.name}/{clip}", reason) for part in parts for clip, reason in part.population.skipped],
        messages=[f"{part.name}: {message}" for part in parts for message in part.population.messages],
        parts=parts,
    )
