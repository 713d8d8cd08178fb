"""The user's files and folders: how programs that use offspec, its commands among them, read, lock and write them."""

from offspec.loaders.files.os_errors import cannot_write, reason, remedy
from offspec.loaders.files.small_files import MOST_TEXT_BYTES, parse_json, read_small_file

from .checkpoints.atomic_files import check_writable, lock, locked_name
from .user_folders import expand_home, home_folder, user_folder

__all__ = [
    "MOST_TEXT_BYTES",
    "cannot_write",
    "check_writable",
    "expand_home",
    "home_folder",
    "lock",
    "locked_name",
    "parse_json",
    "read_small_file",
    "reason",
    "remedy",
    "user_folder",
]
