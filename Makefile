# `run` and `test` are the commands of the README, `dist` makes packages; the others are for
# development.
.PHONY: run test test-kernel bench build dist hooks packages

# Packages that Harvest needs at run time, and those that only its tests need.
PACKAGES := git mmdebstrap ca-certificates e2fsprogs btrfs-progs
TEST_PACKAGES := busybox-static python3 python3-venv uidmap user-mode-linux tinyproxy-bin apache2-bin docker-registry skopeo postgresql libfaketime prometheus systemd
# Programs that the engine is compared with; podman and docker are measured where installed.
BENCH_PACKAGES := busybox-static bubblewrap crun fio runc postgresql

run: PACKAGES_WANTED = $(PACKAGES)
run: packages build
	target/debug/harvest quickstart

test: PACKAGES_WANTED = $(PACKAGES) $(TEST_PACKAGES)
test: packages
	.ci/test

# The engine's tests on Linux 6.1 with cgroup v2; part of `test`.
test-kernel: PACKAGES_WANTED = $(PACKAGES) $(TEST_PACKAGES)
test-kernel: packages
	.ci/second-kernel

# Compares the engine with other programs: some minutes on an idle machine.
# `make bench BENCH=--quick` shows that the benchmarks work.
bench: PACKAGES_WANTED = $(PACKAGES) $(BENCH_PACKAGES)
bench: packages
	cargo supervisor
	cargo build --release --workspace --bins
	target/release/harvest image build agents
	HARVEST_SUPERVISOR=target/supervisor/x86_64-unknown-linux-gnu/supervisor/harvest-supervisor \
	  target/release/harvest-bench --json target/bench.json $(BENCH)

# Only the program, without tests and benchmarks.
build:
	cargo supervisor
	cargo build --bin harvest

# A tarball and a Debian package with their checksums, in target/dist.
PROFILE := release
dist:
	cargo supervisor
	cargo build --bin harvest $(if $(filter release,$(PROFILE)),--release)
	packaging/dist target/$(PROFILE)/harvest target/dist

# Installs a hook that checks format and lints of the changed crates before a commit. All worktrees
# share it.
hooks:
	@hook=$$(git rev-parse --path-format=absolute --git-path hooks)/pre-commit; \
	ours='exec "$$(git rev-parse --show-toplevel)/.ci/pre-commit"'; \
	if [ -e "$$hook" ] && ! grep -qF "$$ours" "$$hook"; then \
	  echo "error: $$hook was not installed by Harvest and stays as it is" >&2; \
	  echo "hint: call .ci/pre-commit from it, or remove it" >&2; exit 1; \
	fi; \
	mkdir -p "$$(dirname "$$hook")" && printf '#!/bin/sh\n%s\n' "$$ours" > "$$hook.new" \
	  && chmod +x "$$hook.new" && mv "$$hook.new" "$$hook" && echo "installed $$hook"

packages:
	@missing=$$(dpkg-query -W -f '$${Package} $${db:Status-Status}\n' $(PACKAGES_WANTED) 2>/dev/null \
	  | awk '$$2=="installed"{print $$1}' | sort > .packages.tmp; \
	  printf '%s\n' $(PACKAGES_WANTED) | sort | comm -23 - .packages.tmp; rm -f .packages.tmp); \
	if [ -n "$$missing" ]; then \
	  echo "installing $$missing"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends $$missing; \
	fi
