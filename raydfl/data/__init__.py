"""Recordings in, clients' batches out: data sets, features, splits, partitions and corruption.

Imports core; knows no method, no attack and no Ray. Begin with dataset.py and build.py, which takes a data set all the way to its
clients; sets/ has one file for each built-in data set.
"""
