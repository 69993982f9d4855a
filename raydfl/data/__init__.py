"""Recordings in, clients' batches out: data sets, features, partitions and corruption."""
