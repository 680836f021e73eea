"""A workspace is read without ever leaving it, and its state has a name."""

import os
from pathlib import Path

import pytest
from gyre_scheduler import evaluation_files
from gyre_scheduler.evaluation_files import Files, Unreadable, digest


def laid_out(place):
    inside = place / "workspace"
    (inside / "src/deep").mkdir(parents=True)
    (inside / "src/main.py").write_text("print(1)\n")
    (inside / "src/deep/note").write_text("n")
    (inside / "README").write_text("hello")
    return inside


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "secret").write_text("the secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("the secret")
    return laid_out(tmp_path)


def read(workspace, path, offset=0, limit=1000):
    with Files.of(workspace) as files:
        return files.read(path, offset, limit)


def entries(workspace, folder="", limit=100):
    with Files.of(workspace) as files:
        found, whole = files.entries(folder, limit)
        return [entry.path for entry in found], whole


def test_files_are_read_in_parts_and_told_with_their_size(workspace):
    assert read(workspace, "README") == (b"hello", 5)
    assert read(workspace, "./src//deep/note") == (b"n", 1)
    assert read(workspace, "README", offset=1, limit=2) == (b"el", 5)
    assert read(workspace, "README", offset=10**30) == (b"", 5)


def test_folders_are_listed_from_the_top_down(workspace):
    everything = ["README", "src", "src/deep", "src/main.py", "src/deep/note"]
    assert entries(workspace) == (everything, True)
    assert entries(workspace, "src") == (everything[2:], True)
    assert entries(workspace, limit=2) == (everything[:2], False)


LEADS_OUT = {
    "link": "../secret",
    "absolute": "/etc/passwd",
    "folder": "../outside",
    "inner": "README",
    "loop": "loop",
}


@pytest.mark.parametrize("path", ["link", "absolute", "folder/secret", "src/folder/secret", "inner", "loop"])
def test_no_link_is_followed(workspace, path):
    for name, target in LEADS_OUT.items():
        (workspace / name).symlink_to(target)
    (workspace / "src/folder").symlink_to("../../outside", target_is_directory=True)
    with pytest.raises(Unreadable, match="symbolic link"):
        read(workspace, path)


def test_a_link_that_appears_after_the_look_is_not_followed_either(workspace, monkeypatch):
    """What keeps links from being followed is how files are opened, not the check before it."""
    (workspace / "link").symlink_to("../secret")
    (workspace / "folder").symlink_to("../outside")
    monkeypatch.setattr(evaluation_files, "_no_link", lambda *look: None)
    for path in ("link", "folder/secret"):
        with pytest.raises(Unreadable):
            read(workspace, path)
    with pytest.raises(Unreadable):
        entries(workspace, "folder")


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "/etc/passwd",
        "src/../../secret",
        "..",
        "none",
        "src",
        "README/x",
        "a\0b",
        "\ud800",
        "x" * 5000,
    ],
)
def test_what_is_no_file_inside_is_refused_in_one_line(workspace, path):
    with pytest.raises(Unreadable) as refused:
        read(workspace, path)
    assert "\n" not in str(refused.value) and str(refused.value).encode()


def test_links_are_listed_and_not_entered(workspace):
    (workspace / "out").symlink_to("../outside")
    with Files.of(workspace) as files:
        found, whole = files.entries("", 100)
    (link,) = [entry for entry in found if entry.kind == "link"]
    assert (link.path, link.target, whole) == ("out", "../outside", True)
    with pytest.raises(Unreadable, match="symbolic link"):
        entries(workspace, "out")


def test_a_pipe_is_no_file_and_holds_nobody_up(workspace):
    os.mkfifo(workspace / "pipe")
    with pytest.raises(Unreadable, match="not a regular file"):
        read(workspace, "pipe")
    assert digest(workspace).startswith("sha256:")


def test_a_workspace_that_is_a_link_is_not_opened(workspace, tmp_path):
    (tmp_path / "other").symlink_to("outside")
    with pytest.raises(Unreadable, match="cannot be opened"):
        read(tmp_path / "other", "secret")


def test_deep_and_wide_folders_are_bounded(workspace):
    deep = workspace
    for _ in range(evaluation_files.DEPTH + 3):
        deep = deep / "d"
        deep.mkdir()
    found, whole = entries(workspace, limit=10_000)
    assert not whole and len(found) < 100
    assert digest(workspace).startswith("sha256-part:")


def test_equal_states_have_equal_names(workspace, tmp_path):
    copy = laid_out(tmp_path / "copy")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    assert digest(workspace) == digest(copy)


CHANGES = {
    "content": lambda w: (w / "README").write_text("hellO"),
    "name": lambda w: (w / "README").rename(w / "READNE"),
    "more": lambda w: (w / "empty").touch(),
    "folder": lambda w: (w / "empty").mkdir(),
    "link": lambda w: (w / "empty").symlink_to("x"),
    "target": lambda w: (w / "empty").symlink_to("y"),
    "mode": lambda w: (w / "README").chmod(0o755),
    "place": lambda w: (w / "src/deep/note").rename(w / "note"),
}


def test_different_states_have_different_names(workspace, tmp_path):
    names = {digest(workspace)}
    for name, change in CHANGES.items():
        changed = laid_out(tmp_path / name)
        change(changed)
        names.add(digest(changed))
    assert len(names) == len(CHANGES) + 1


def test_a_large_workspace_is_named_in_part(workspace, monkeypatch):
    monkeypatch.setattr(evaluation_files, "DIGEST_BYTES", 1000)
    with (workspace / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    first = digest(workspace)
    assert first.startswith("sha256-part:")
    (workspace / "huge").unlink()
    assert digest(workspace).startswith("sha256:")


def test_names_that_are_no_text_are_named(workspace):
    (Path(os.fsdecode(os.fsencode(workspace) + b"/\xff\xfe"))).write_text("x")
    assert digest(workspace).startswith("sha256:")
