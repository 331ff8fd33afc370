"""Files that are run, or believed, belong to the user, and nobody else may write them."""

import os
import stat

import pytest

from actors.kernels.common.files import distrust_of_file, distrust_of_folder, make_private


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "cache" / "native"
    path.mkdir(mode=0o700, parents=True)
    return path


def test_a_folder_of_ones_own_is_trusted(folder):
    assert distrust_of_folder(folder) is None


def test_a_folder_that_is_not_there_yet_is_judged_by_those_above(folder):
    assert distrust_of_folder(folder / "later" / "still") is None
    folder.chmod(0o777)
    assert f"others may write {folder} " in distrust_of_folder(folder / "later" / "still")


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o722])
def test_a_folder_that_others_may_write_is_named_with_its_mode_and_the_mend(folder, mode):
    folder.chmod(mode)
    why = distrust_of_folder(folder)
    assert why.startswith(f"others may write {folder} (uid {os.getuid()}, mode {mode:o})")
    assert why.endswith(f"chmod go-w {folder}")


def test_a_folder_above_that_others_may_write_is_named(folder):
    folder.parent.chmod(0o777)
    assert distrust_of_folder(folder).startswith(f"others may write {folder.parent} ")


def test_the_sticky_bit_will_do_above_a_folder_but_not_on_it(folder):
    folder.parent.chmod(0o1777)
    assert distrust_of_folder(folder) is None
    folder.chmod(0o1777)
    assert "mode 1777" in distrust_of_folder(folder)


def test_a_link_is_followed_and_both_ways_are_judged(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    assert distrust_of_folder(link) is None
    folder.chmod(0o777)
    assert distrust_of_folder(link).startswith(f"others may write {folder} ")


def test_the_sticky_bit_on_a_folder_will_not_do_behind_a_link_above_it(folder, tmp_path):
    folder.chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to(folder.parent, target_is_directory=True)
    assert "mode 1777" in distrust_of_folder(link / "native")


def test_what_leads_through_too_many_links_is_not_trusted(folder, monkeypatch):
    monkeypatch.setattr("actors.kernels.common.files._MAX_PATHS", 2)
    assert "more than 2 folders" in distrust_of_folder(folder)


def test_a_link_that_leads_to_itself_ends(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    distrust_of_folder(loop / "inside")


def test_what_belongs_to_another_user_is_refused(folder, monkeypatch):
    if os.getuid() == 0:
        os.chown(folder, 12345, 12345)
        owner = 12345
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        owner = os.getuid()
    assert f"belongs to another user (uid {owner}, mode" in distrust_of_folder(folder)


def test_a_file_is_plain_and_nobody_else_may_write_it(folder):
    file = folder / "kernels.so"
    file.write_bytes(b"")
    file.chmod(0o600)
    assert distrust_of_file(file) is None
    file.chmod(0o666)
    assert f"others may write {file} " in distrust_of_file(file)
    link = folder / "link.so"
    link.symlink_to(file)
    assert "no plain file" in distrust_of_file(link)
    with pytest.raises(FileNotFoundError):
        distrust_of_file(folder / "nothing.so")


def test_permission_of_a_group_is_no_matter_where_it_is_the_users_alone(folder, monkeypatch):
    import grp
    import pwd

    user = pwd.getpwuid(os.geteuid())
    own = grp.struct_group((user.pw_name, "x", folder.stat().st_gid, []))
    shared = grp.struct_group((user.pw_name, "x", folder.stat().st_gid, ["somebody"]))
    folder.chmod(0o770)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: own)
    assert distrust_of_folder(folder) is None
    monkeypatch.setattr(grp, "getgrgid", lambda gid: shared)
    assert "mode 770" in distrust_of_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o770


def test_folders_are_made_for_the_user_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "one" / "two")
        make_private(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    for path in (tmp_path / "one", tmp_path / "one" / "two"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "file")
