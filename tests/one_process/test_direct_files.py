"""Files written past the system's cache hold what was given, of any length, on any file system."""

from __future__ import annotations

import errno
import os
import zlib

import pytest
import torch

from shardledger.checkpoint import direct
from shardledger.checkpoint.direct import BUFFER_BYTES, SMALL_BYTES, DirectFile
from shardledger.checkpoint.stream import memory_of, write_parts
from shardledger.transport.disk import SECTOR

BIG = SMALL_BYTES + BUFFER_BYTES
SIZES = [
    [8, 1, 0, 3],
    [SMALL_BYTES],
    [80, BIG],  # a header moves everything off the sectors
    [SECTOR, BIG - SECTOR],
    [1000, BUFFER_BYTES, BUFFER_BYTES, 5],
    [3 * BUFFER_BYTES + 1],
]


def parts_of(sizes):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 256, (size,), generator=generator).to(torch.uint8) for size in sizes]
    return [memoryview(bytes(tensors[0].tolist())), *(memory_of(tensor) for tensor in tensors[1:])]


def write_and_compare(path, parts):
    content = b"".join(map(bytes, parts))
    check = write_parts(path, parts)
    assert path.read_bytes() == content
    assert check == f"{zlib.crc32(content):08x}"


@pytest.mark.parametrize("sizes", SIZES)
def test_a_file_holds_the_bytes_and_its_checksum_is_theirs(tmp_path, sizes):
    write_and_compare(tmp_path / "file", parts_of(sizes))


def refusing(monkeypatch, *, at_open):
    """A file system without direct I/O: it says so when the file is opened, or when it is written."""
    seen = []
    real_open, real_write = os.open, os.write

    def may_open(path, flags, mode=0o777):
        if flags & os.O_DIRECT and at_open:
            seen.append("open")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real_open(path, flags, mode)

    def may_write(handle, content):
        import fcntl

        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT and not at_open:
            seen.append("write")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(handle, content)

    monkeypatch.setattr(direct.os, "open", may_open)
    monkeypatch.setattr(direct.os, "write", may_write)
    return seen


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct I/O")
@pytest.mark.parametrize("at_open", [True, False])
def test_a_file_system_that_refuses_gets_the_same_bytes_through_its_cache(tmp_path, monkeypatch, at_open):
    seen = refusing(monkeypatch, at_open=at_open)
    write_and_compare(tmp_path / "file", parts_of(SIZES[2]))
    assert seen == ["open" if at_open else "write"]


def test_a_disk_that_takes_less_than_it_is_given_is_given_the_rest_and_a_full_one_is_named(tmp_path, monkeypatch):
    real, room = os.write, [2 * BIG]

    def write(handle, content):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(handle, content[: min(len(content), 16 * SECTOR)])
        room[0] -= count
        return count

    monkeypatch.setattr(direct.os, "write", write)
    write_and_compare(tmp_path / "file", parts_of(SIZES[2]))
    room[0] = BUFFER_BYTES
    with pytest.raises(OSError, match=r"(?s)No space.*full") as raised:
        write_parts(tmp_path / "full", parts_of(SIZES[2]))
    assert raised.value.errno == errno.ENOSPC


def test_an_exclusive_file_never_replaces_another(tmp_path):
    (tmp_path / "file").write_bytes(b"here")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file", BIG, exclusive=True)
    assert (tmp_path / "file").read_bytes() == b"here"
