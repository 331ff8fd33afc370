"""Files of measurements: who else may write what lies around them."""

import os
import stat
from dataclasses import dataclass

import pytest

from actors.kernels.common.files import distrust_of_folder, read_object, replace_object


@dataclass
class Measured:
    rate: int


@pytest.fixture
def open_handed():
    """A process whose new files and folders anybody may write."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_handed")
def test_the_folders_that_are_made_for_a_file_are_private(tmp_path):
    tmp_path.chmod(0o700)
    file = tmp_path / "cache" / "native" / "rates.json"
    replace_object(file, Measured(1))
    assert read_object(file, Measured) == Measured(1)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (file.parent, file.parent.parent)]
    assert modes == [0o700, 0o700]
    assert distrust_of_folder(file.parent) is None
