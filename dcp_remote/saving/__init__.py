"""Save a state: plan, stage, pack, deduplicate, upload, report, and assemble the manifest. See ARCHITECTURE.md."""
