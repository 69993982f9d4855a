"""The recordings in one larger file, such as a shard, when nobody asks what else is said of them."""

from __future__ import annotations

from pathlib import Path

from raydfl.core.errors import DataError
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.films import has_decoder
from raydfl.data.manifest import FFMPEG_SUFFIXES, FILM_SUFFIXES
from raydfl.data.pictures import PICTURE_SUFFIXES

PACKED_SUFFIXES = (".tar", ".parquet", ".arrow")
"""Endings of files that hold recordings."""


def list_contents(file: Path, pictures: bool = False) -> list[str]:
    """List the recordings in a tar archive, or in a Parquet or Arrow file, by their addresses, in their order.

    Args:
        pictures: list the images of a tar archive in place of its recordings.

    Raises:
        DataError: the file cannot be read, or holds none, or a table holds several columns of them.
    """
    # Every set imports this folder's door: what only this function needs would slow down all of them.
    from raydfl.data.sets._tables import open_table, readable_table
    from raydfl.data.sets._tar import members

    if file.suffix.lower() == ".tar":
        sounds = (*AUDIO_SUFFIXES, *(FFMPEG_SUFFIXES if has_decoder() else ()))
        wanted = (*PICTURE_SUFFIXES, *FILM_SUFFIXES) if pictures else sounds
        found = [member.address for member in members(file) if member.name.lower().endswith(wanted)]
        if not found:
            raise DataError(f"{file}: there is no {'image' if pictures else 'recording'} of a kind that is read in it")
        return found
    table = open_table(file)
    with readable_table(file):
        return table.places(table.recordings(None))
