"""The benchmark: what our client and its peers cost on one and the same server."""
