"""Collective operations of the ranks of a process group, over its key-value store and never by torch's collectives.

`group` numbers the operations of its ranks, `collective` is one operation, `outcome` its end, `messages` its keys;
`heartbeat` shows that a rank lives, `call_position` where the rank is, `failure_detector` finds ranks that do not live
or do not come; `key_value` is the client of the store, `torch_errors` has what torch raises for it, `member` what an
operation uses of its group; `incarnation` keeps the ranks apart from those of earlier attempts, and `use_counter` is
the way in which groups of one name find each other.
"""
