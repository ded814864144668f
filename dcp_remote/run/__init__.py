"""Runs and single checkpoints in a store: commit, find, retire, remove orphans, recover. Imports no torch.

conditional_put settles every conditional PUT by reading; commit (of a checkpoint by itself) and catalog_store (of a
run) are built on it. lookup finds a checkpoint and reads its manifest, foreign_checkpoints says what else lies at a
URL; info has what users are told of a run, waiting waits for a newer checkpoint. job saves into a run, labels names
and pins. retention decides which checkpoints to retire and thinning makes the smaller manifests; deletions and
background_deletions carry that out, with live_shards to tell which objects may be deleted. gc removes orphans.
recovery rebuilds a lost catalog.
copying copies runs, usage counts bytes by shard, differences compares two checkpoints, runs_below lists runs.
verification finds damage, by shard_check.
"""
