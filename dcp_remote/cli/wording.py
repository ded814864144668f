"""Messages of errors in the words of the command line."""

from __future__ import annotations

import re

# Advice in messages, for who calls functions, and the options that the command line has for it.
_OPTIONS = (
    (r"force=True \(`--force`\)", "--force"),
    (r"overwrite=True", "--overwrite"),
    (r"allow_pickle=True", "--allow-pickle"),
    (r"storage_options\['endpoint_url'\]", "--endpoint-url"),
    (r"storage_options\['region_name'\]", "--region"),
    (r"storage_options\['profile_name'\]", "--profile"),
    (r"storage_options\['(\w+)'\]", r"--option \1"),
    (r"storage_options=\{'(\w+)': (\w+)\}", r"--option \1=\2"),
    (r"storage_options", "--option"),
    (r"'anon': True", "--option anon=true"),
    (r"'(aws_\w+|bearer_token)'", r"--option \1"),
    (r"^dtype must", "--dtype must"),
    (r"torch\.dtype, such as torch\.", "dtype, such as "),
    (r"file_bytes_max", "--file-bytes-max"),
    (r"^rename and key are", "--rename and --key are"),
    (r"^rename ", "--rename "),
    (r"rename=\{name: None\}", "--rename NAME="),
    (r"Give None to some alone", "Leave out some alone"),
    (r"Rename the other to None to leave it out", "Leave the other out by --rename NAME="),
    (r'kind="(\w+)"', r"--kind \1"),
)


def name_options(message: str) -> str:
    """Return a message in which advice names options of the command line in place of arguments of functions."""
    for pattern, option in _OPTIONS:
        message = re.sub(pattern, option, message)
    return message
