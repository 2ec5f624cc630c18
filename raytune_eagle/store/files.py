"""Whole files in a local folder or any `pyarrow.fs` filesystem: there entirely or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytune_eagle.errors import SpecError, StoreError, StoreOutageError
from raytune_eagle.store.folder import locked, make_durable, sync_folder

TEMPORARY_SUFFIX = ".tmp"
_FEW_ROWS = 100
_GROUP_ROWS = 65_536
"""Rows that are decoded together: readers pass over groups by their statistics, and need not hold a whole file."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2), Linux 3.15
READ_ERRORS = (OSError, pa.ArrowException)
"""What pyarrow raises for a file that it cannot open or decode."""


def open_files(root: str, filesystem: fs.FileSystem | None = None) -> Files:
    """Files under `root`: a path, a URI, or a path inside `filesystem`."""
    if filesystem is not None:
        return Files(filesystem, root.rstrip("/"))
    if "://" not in root:
        return LocalFiles(_expanded(root).absolute())
    try:
        filesystem, path = fs.FileSystem.from_uri(root)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{root}: cannot be opened: {_one_line(error)}") from error
    return LocalFiles(Path(path)) if isinstance(filesystem, fs.LocalFileSystem) else Files(filesystem, path.rstrip("/"))


def _expanded(root: str) -> Path:
    try:
        return Path(root).expanduser()
    except RuntimeError as error:
        raise SpecError(f"{root}: no such user; write the whole path") from error


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and isinstance(error.errno, int):
        return os.strerror(error.errno)
    return " ".join(str(error).split())


def _hidden(name: str) -> str:
    """Name while a file is written: pyarrow, DuckDB's globs and Spark pass over names with a dot in front."""
    return f".{name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"


class Files:
    """Folder of any filesystem; a move into place is as atomic as that makes it (S3: a copy, seen whole or not)."""

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self.filesystem = filesystem
        self.root = root

    def path(self, *parts: str) -> str:
        """Full path inside the filesystem."""
        return "/".join([self.root, *parts] if self.root else parts)

    def entries(self, folder: str, *, folders: bool = False) -> list[str]:
        """Sorted names in a folder, hidden ones included; none when there is no such folder."""
        return [name for name, is_folder in self._listed(folder) if is_folder == folders]

    def names(self, folder: str) -> list[str]:
        """Sorted visible names that end in ``.parquet``, whatever they name: who opens it is told what is wrong."""
        return [name for name, _ in self._listed(folder) if name.endswith(".parquet") and name[0] not in "._"]

    def others(self, folder: str, names: Collection[str]) -> list[str]:
        """What is in a folder beside `names`: files, folders and hidden ones, but none that is being written."""
        return [name for name, _ in self._listed(folder) if name not in names and not name.endswith(TEMPORARY_SUFFIX)]

    def _listed(self, folder: str) -> list[tuple[str, bool]]:
        """Sorted names in a folder, each with whether it is a folder itself."""
        try:
            found = self.filesystem.get_file_info(fs.FileSelector(self.path(folder), allow_not_found=True))
        except READ_ERRORS as error:
            raise StoreOutageError(f"{self.path(folder)}: cannot be listed: {_one_line(error)}") from error
        return sorted((info.base_name, info.type == fs.FileType.Directory) for info in found)

    def check(self, path: str) -> None:
        """Raise OSError where no file can be opened: pyarrow would wait for who writes into a pipe, say."""

    def open(self, folder: str, name: str) -> pq.ParquetFile:
        """Open a Parquet file; the caller closes it. Raises one of `READ_ERRORS` for a torn one."""
        self.check(self.path(folder, name))
        source = self.filesystem.open_input_file(self.path(folder, name))
        try:
            return pq.ParquetFile(source, page_checksum_verification=True)
        except BaseException:
            source.close()
            raise

    def write_table(self, folder: str, name: str, table: pa.Table) -> None:
        """Write a Parquet file whole; page checksums let a reader see rotten bytes."""
        sink = pa.BufferOutputStream()
        many = table.num_rows > _FEW_ROWS  # dictionaries and statistics of a few rows cost more than they save
        options = {"use_dictionary": many, "write_statistics": many, "row_group_size": _GROUP_ROWS}
        pq.write_table(table, sink, write_page_checksum=True, **options)
        self.write(folder, name, sink.getvalue())

    def write(self, folder: str, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file whole. Raises `StoreOutageError` naming it; then nothing of it is visible."""
        hidden = self.path(folder, _hidden(name))
        try:
            self._put(folder, hidden, self.path(folder, name), data)
        except READ_ERRORS as error:
            with contextlib.suppress(*READ_ERRORS):
                self.filesystem.delete_file(hidden)
            raise StoreOutageError(f"{self.path(folder, name)}: cannot be written: {_one_line(error)}") from error

    def _put(self, folder: str, hidden: str, final: str, data: bytes | pa.Buffer) -> None:
        self.filesystem.create_dir(self.path(folder), recursive=True)
        with self.filesystem.open_output_stream(hidden) as stream:
            stream.write(data)
        self.filesystem.move(hidden, final)

    def remove(self, folder: str, name: str) -> None:
        """Remove a file; one that is gone or cannot be removed is left to the next opening."""
        with contextlib.suppress(*READ_ERRORS):
            self.filesystem.delete_file(self.path(folder, name))

    def remove_temporaries(self, folder: str) -> None:
        """Remove what writers that were killed left behind."""
        for name in self.entries(folder):
            if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX):
                self.remove(folder, name)

    @contextlib.contextmanager
    def lock(self, folder: str, what: str) -> Iterator[None]:
        """No lock: object stores have none to offer. Only one process may write a study there."""
        del folder, what
        yield


class LocalFiles(Files):
    """Folder of this machine (or a mounted one): synced to disk before a write returns, and with a lock."""

    def __init__(self, root: Path) -> None:
        super().__init__(fs.LocalFileSystem(), str(root))

    def _listed(self, folder: str) -> list[tuple[str, bool]]:
        """From the folder alone: pyarrow would ask for each file's size, and fail at one link that leads nowhere."""
        try:
            with os.scandir(self.path(folder)) as found:
                return sorted((entry.name, _is_folder(entry)) for entry in found)
        except FileNotFoundError:
            return []
        except OSError as error:
            if isinstance(error, NotADirectoryError) and not folder:
                raise SpecError(f"{self.root}: a file, or in a file, and no folder of records; name another") from error
            raise StoreOutageError(f"{self.path(folder)}: cannot be listed: {_one_line(error)}") from error

    def check(self, path: str) -> None:
        """Raise OSError for a folder, a pipe, and a link that leads nowhere or round in a circle."""
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - names are text here
            raise OSError(errno.EINVAL, "not a file", path)

    def _put(self, folder: str, hidden: str, final: str, data: bytes | pa.Buffer) -> None:
        directory = Path(self.path(folder))
        make_durable(directory)
        with Path(hidden).open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(hidden).replace(final)
        sync_folder(directory)

    @contextlib.contextmanager
    def replacing(self, folder: str, name: str, keep: Sequence[str]) -> Iterator[str]:
        """Yield a hidden folder to fill; it then takes the place of ``folder/name`` in one step.

        `keep` are files of the old folder that go along. Whatever fails before the exchange leaves the old folder.
        """
        hidden = f"{folder}/{_hidden(name)}"
        old, new = Path(self.path(folder, name)), Path(self.path(hidden))
        try:
            new.mkdir()
            yield hidden
            for each in keep:
                _keep(old / each, new / each)
            sync_folder(new)
            _exchange(old, new)
            sync_folder(old.parent)
        except OSError as error:
            raise StoreError(f"{old}: cannot be replaced: {_one_line(error)}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)  # since the exchange: what was there before

    def remove_temporaries(self, folder: str) -> None:
        """Also folders that were to replace others, or had been replaced, when their writer was killed."""
        super().remove_temporaries(folder)
        for name in self.entries(folder, folders=True):
            if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX):
                shutil.rmtree(self.path(folder, name), ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, folder: str, what: str) -> Iterator[None]:
        """Hold the folder's lock; see `raytune_eagle.store.folder.locked`."""
        with locked(Path(self.path(folder)), what):
            yield


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):  # a link that leads round in a circle
        return entry.is_dir()
    return False


def _keep(old: Path, new: Path) -> None:
    """Have it in both places: a folder as a copy, since folders cannot have two names."""
    if old.is_dir() and not old.is_symlink():
        shutil.copytree(old, new, symlinks=True)
    else:
        os.link(old, new, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step; no name is ever missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
