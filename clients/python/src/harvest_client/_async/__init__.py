"""The asynchronous client. `_sync` is generated from this package: see `scripts/make_sync.py`."""
