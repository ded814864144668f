"""Folder on the path of programs that `python -m dcp_remote.run` starts; nothing imports from here."""
