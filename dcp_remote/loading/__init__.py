"""Read a checkpoint: plan ranges, fetch and verify them, and place their bytes. See ARCHITECTURE.md."""
