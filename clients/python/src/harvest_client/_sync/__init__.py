"""Generated: see `scripts/make_sync.py`."""
