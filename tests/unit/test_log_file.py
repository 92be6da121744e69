"""The log of a child process: bounded on disk, its last lines at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.log_file import TAIL_LINES, LogFile


def test_output_arrives_as_it_was_written(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    log.write(b"one\ntw")
    log.write(b"o\n")
    assert log.path.read_bytes() == b"one\ntwo\n"
    assert log.last_lines(5) == ["one", "two"]


def test_a_full_file_is_kept_once_and_then_replaced(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=10)
    for number in range(5):
        log.write(f"line {number}\n".encode())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert log.path.read_text() == "line 4\n"
    assert log.path.with_name("a.log.1").read_text() == "line 3\n"


def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    first = LogFile(tmp_path / "a.log")
    first.write(b"why it ended\n")
    first.close()
    LogFile(tmp_path / "a.log").write(b"again\n")
    assert (tmp_path / "a.log").read_text() == "again\n"
    assert (tmp_path / "a.log.1").read_text() == "why it ended\n"


def test_last_lines_have_no_terminal_codes_and_no_empty_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    log.write(b"\x1b[31merror:\x1b[0m no\x07\r\n\n\nunfinished")
    assert log.last_lines(5) == ["error: no", "unfinished"]


def test_an_access_log_does_not_push_out_the_last_words(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", told_elsewhere="{")
    log.write(b"critical: no memory\n" + b'{"status":200}\n' * TAIL_LINES + b'{"stat')
    log.write(b'us":200}\n')
    assert log.last_lines(5) == ["critical: no memory"]
    assert log.path.read_text().count('{"status":200}\n') == TAIL_LINES + 1


def test_the_last_lines_stay_readable_after_closing(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    log.write(b"bye\n")
    log.close()
    assert log.last_lines(1) == ["bye"]


def test_what_a_full_disk_does_not_take_is_counted() -> None:
    log = LogFile(Path("/dev/full"))
    log.write(b"lost\n")
    assert log.last_lines(1) == ["lost"]


@given(lines=st.lists(st.text("ab ", min_size=1, max_size=9), max_size=40), cut=st.integers(1, 7))
def test_lines_may_be_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cut: int
) -> None:
    log = LogFile(tmp_path_factory.getbasetemp() / "cut.log")
    text = "".join(f"{line}\n" for line in lines).encode()
    for start in range(0, len(text), cut):
        log.write(text[start : start + cut])
    log.close()
    full = [line.rstrip() for line in lines][-TAIL_LINES:]
    assert log.last_lines(TAIL_LINES) == [line for line in full if line]
