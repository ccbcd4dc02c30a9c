# run, test, build. Everything else is in CONTRIBUTING.md.
.PHONY: build test

build:
	cargo supervisor
	cargo build --workspace

test: build
	cargo nextest run --workspace 
