"""Write clients.parquet: a thousand clients with rows of a list of clips, a room and a power."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet

clients = 1000
number = np.arange(clients)
table = {
    "first": number * 7 % 50,
    "clips": 40 + number % 10,
    "room": np.where(number % 3, "kitchen", "hall"),
    "power": 1 + number % 4,
}
pyarrow.parquet.write_table(pa.table(table), "clients.parquet")
