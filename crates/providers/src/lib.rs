//! Starts, stops and snapshots sandboxes: local, fake; one contract suite for all.
