"""A fake remote file system that counts its calls and fails on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow.fs as fs


class Failing(fs.FileSystemHandler):
    """Local file system with injected failures.

    Args:
        fails: called before each operation with its kind ("read", "write", "move", "delete", "list") and path; ``True``
            raises OSError.
        kind: type name of the file system; "s3": objects appear when they are complete.
    """

    def __init__(self, fails: Callable[[str, str], bool], kind: str = "far") -> None:
        self._fails = fails
        self._kind = kind
        self._local = fs.LocalFileSystem()
        self.calls: list[tuple[str, str]] = []

    def _call(self, kind: str, path: str) -> None:
        self.calls.append((kind, path))
        if self._fails(kind, path):
            raise OSError(f"no answer to {kind}")

    def get_type_name(self) -> str:
        return self._kind

    def normalize_path(self, path: str) -> str:
        return self._local.normalize_path(path)

    def get_file_info(self, paths: list[str]) -> list[Any]:
        for path in paths:
            self._call("list", path)
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[Any]:
        self._call("list", selector.base_dir)
        return self._local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        raise AssertionError("no folder is ever deleted")

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise AssertionError("no folder is ever deleted")

    def delete_root_dir_contents(self) -> None:
        raise AssertionError("no folder is ever deleted")

    def delete_file(self, path: str) -> None:
        self._call("delete", path)
        self._local.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._call("move", dest)
        self._local.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        raise AssertionError("nothing is ever copied there")

    def open_input_stream(self, path: str) -> Any:
        self._call("read", path)
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        self._call("read", path)
        return self._local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._call("write", path)
        if self._kind == "s3":  # object stores have no folders
            self._local.create_dir(path.rpartition("/")[0], recursive=True)
        return self._local.open_output_stream(path, metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise AssertionError("nothing is ever appended")
