"""The built-in data sets. One file each; its name is the set's name in a configuration. Begin with emodb.py."""

from raydfl.data.sets._files import PACKED_SUFFIXES, FileDataset, list_contents, list_recordings

__all__ = ["PACKED_SUFFIXES", "FileDataset", "list_contents", "list_recordings"]
