"""The user's folders, re-exported from `loaders.user_folders` for the CLI."""

from offspec.loaders.user_folders import expand_home, home_folder, user_folder

__all__ = ["expand_home", "home_folder", "user_folder"]
