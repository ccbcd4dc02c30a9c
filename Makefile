# The two commands of the README are `run` and `test`; the rest serves them.
.PHONY: run test test-kernel bench build hooks packages

# What the product calls at run time, and what its tests need besides.
PACKAGES := git mmdebstrap ca-certificates e2fsprogs btrfs-progs
TEST_PACKAGES := busybox-static python3 python3-venv uidmap user-mode-linux docker-registry skopeo postgresql libfaketime
# Whom the engine is measured beside; podman and docker too, where they are.
BENCH_PACKAGES := busybox-static bubblewrap crun runc postgresql

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

# The engine beside its peers; minutes on an idle machine. `make bench BENCH=--quick` shows that it works.
bench: PACKAGES_WANTED = $(PACKAGES) $(BENCH_PACKAGES)
bench: packages
	cargo supervisor
	cargo build --release --workspace --bins
	target/release/harvest image build claude
	target/release/harvest-bench --json target/bench.json $(BENCH)

# The programs, and nothing that only tests or measurements need.
build:
	cargo supervisor
	cargo build --bin harvest

# Format and lints of what a commit touches, before it is made. One hook serves every worktree.
hooks:
	@hook=$$(git rev-parse --path-format=absolute --git-path hooks)/pre-commit; \
	ours='exec "$$(git rev-parse --show-toplevel)/.ci/pre-commit"'; \
	if [ -e "$$hook" ] && ! grep -qF "$$ours" "$$hook"; then \
	  echo "error: $$hook is not ours and is left alone" >&2; \
	  echo "hint: let it call .ci/pre-commit, or move it away" >&2; exit 1; \
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
