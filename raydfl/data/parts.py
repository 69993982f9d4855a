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
from raydfl.data.population import Population, StoredView
from raydfl.data.tables import Tables, encode, no_clips


def join_parts(parts: Mapping[str, Population]) -> Population:
    """Return the population of all parts, in the order given.

    Args:
        parts: by name; a single part without a name is the federation.
    """
    if "" in parts:
        return parts[""]
    ids = ClientIds.from_strings(f"{name}/{client}" for name, part in parts.items() for client in part.ids)
    sizes = np.concatenate([part.sizes() for part in parts.values()]).astype(np.int64)
    places = list(dict.fromkeys(place for part in parts.values() for place in part.places))
    codes = [np.array([*map(places.index, part.places)], np.int32)[part.place_codes] for part in parts.values()]
    place = {"place": encode(np.concatenate(codes), places)} if any(places) else {}
    views = [part.views[FIRST_VIEW] for part in parts.values()]
    lengths = {view.length for view in views}
    return Population(
        Tables(no_clips(), pa.record_batch({**ids.columns(), **place, "examples": pa.array(sizes)})),
        [f"{name}/{label}" for name, part in parts.items() for label in part.classes],
        {FIRST_VIEW: StoredView(lengths.pop() if len(lengths) == 1 else None, bands=views[0].bands)},
        skipped=[(f"{name}/{clip}", reason) for name, part in parts.items() for clip, reason in part.skipped],
        messages=[f"{name}: {message}" for name, part in parts.items() for message in part.messages],
        parts=parts,
    )
