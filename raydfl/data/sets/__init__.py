"""Built-in data sets. Each has a module with the set's name in a configuration. Start reading with emodb.py."""

from raydfl.data.sets._files import PACKED_SUFFIXES, FileDataset, list_contents, list_recordings

__all__ = ["PACKED_SUFFIXES", "FileDataset", "list_contents", "list_recordings"]
