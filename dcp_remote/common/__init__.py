"""Helpers that know nothing of checkpoints: arithmetic, text, digests, deadlines and threads.

Every package may import these modules; they import `dcp_remote.errors` alone. geometry, arrays and units hold boxes,
byte ranges, arrays of int64 and sizes in bytes; digests, XXH3 digests of blocks and pieces; text, text for a terminal;
deadline, deadlines and backoff; threads, gil and hedging, threads that move bytes; picklable_errors, errors that cross
from one rank to another; overrides, methods that a subclass overrides; provenance, the process and software that save;
descriptors and mounts, open files and types of file systems.
"""
