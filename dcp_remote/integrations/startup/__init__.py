"""Folder on the path of programs that `python -m dcp_remote.launch` starts; nothing imports from here."""
