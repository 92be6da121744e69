"""What a deployment writes is for the user who runs it alone: configurations with secrets, logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.log_file import LogFile
from gateway.run_folder import locked_run_folder

SECRET = "groups: [{env: {HF_TOKEN: secret}}]\n"


@pytest.fixture(autouse=True, params=[0o022, 0o000], ids=["usual umask", "no umask"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rights that new files have by default."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def shown_to_others(path: Path) -> list[str]:
    """Whatever there is below a folder that other users have any right to."""
    return [str(one.relative_to(path)) for one in path.rglob("*") if one.stat().st_mode & 0o077]


def write_all(path: Path) -> None:
    """What a deployment writes."""
    with locked_run_folder(path) as folder:
        folder.write_config(SECRET)
        folder.write_envoy_config("static_resources: {}\n")
        log = LogFile(folder.log_path("rank g0/0"), max_bytes=10)
        for number in range(3):
            log.write(f"line {number}\n".encode())
        log.close()


def test_nothing_in_a_new_folder_is_shown_to_others(tmp_path: Path) -> None:
    write_all(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert shown_to_others(tmp_path / "run") == []
    assert (tmp_path / "run" / "wavegate.yaml").read_text() == SECRET


def test_files_that_were_shown_to_others_before_are_not_any_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    for name in ("wavegate.yaml", "envoy.yaml", "logs/rank-g0-0.log"):
        (folder / name).write_text("as an earlier version wrote it")
        (folder / name).chmod(0o644)
    write_all(folder)
    assert [name for name in shown_to_others(folder) if name != "logs"] == []
    assert (folder / "wavegate.yaml").read_text() == SECRET


def test_a_file_that_somebody_has_open_or_linked_does_not_get_the_secrets(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("")
    (folder / "wavegate.yaml").symlink_to(elsewhere)
    (folder / "envoy.yaml").write_text("")
    with (folder / "envoy.yaml").open() as open_before:
        write_all(folder)
        assert (elsewhere.read_text(), open_before.read()) == ("", "")
    assert (folder / "wavegate.yaml").read_text() == SECRET


def test_a_folder_that_was_there_before_keeps_its_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_all(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
