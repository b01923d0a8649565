"""Files in pieces, one read ahead while another is looked at."""

import os
from pathlib import Path

import pytest

from eagle3_core.checkpoint import stream
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.errors import UnreadableFile


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 1000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10_500))
    return path


@pytest.mark.parametrize(("start", "end"), [(0, 10_500), (7, 10_499), (300, 1300), (300, 1301), (40, 41), (9, 9)])
@pytest.mark.parametrize("row_bytes", [1, 96, 4000])
def test_the_bytes_of_any_stretch_come_in_order(file: Path, start: int, end: int, row_bytes: int) -> None:
    with Stream().opened(file) as opened:
        pieces = [bytes(piece) for piece in opened.pieces(start, end, row_bytes)]
    assert b"".join(pieces) == file.read_bytes()[start:end]
    if row_bytes == 96:
        assert {len(piece) for piece in pieces[:-1]} <= {960}


def test_what_else_is_read_meanwhile_changes_no_later_piece(file: Path) -> None:
    whole, found = file.read_bytes(), b""
    with Stream().opened(file) as opened:
        for number, piece in enumerate(opened.pieces(0, 10_500)):
            found += piece
            if number % 2:
                assert b"".join(map(bytes, opened.pieces(500, 3500))) == whole[500:3500]
                assert b"".join(map(bytes, opened.pieces(20, 30))) == whole[20:30]
    assert found == whole


def test_a_file_that_is_cut_meanwhile_is_named(file: Path) -> None:
    with Stream().opened(file) as opened:
        pieces = opened.pieces(0, 10_500)
        next(pieces)
        os.truncate(file, 5000)
        with pytest.raises(UnreadableFile, match=f"{file.name}.*ended at byte 5,000"):
            list(pieces)


def test_who_looks_at_the_first_piece_alone_closes_the_file(file: Path) -> None:
    with Stream().opened(file) as opened:
        pieces = opened.pieces(0, 10_500)
        assert bytes(next(pieces)) == file.read_bytes()[:1000]
        del pieces
    assert not [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.resolve() == file]
