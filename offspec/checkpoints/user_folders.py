"""The user's folders, re-exported from `loaders.files.user_folders` for the CLI."""

from offspec.loaders.files.user_folders import expand_home, home_folder, user_folder

__all__ = ["expand_home", "home_folder", "user_folder"]
