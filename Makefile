# The two commands of the README are `run` and `test`; the rest serves them.
.PHONY: run test build images packages

# What the product calls at run time, and what its tests need besides.
PACKAGES := git mmdebstrap ca-certificates
TEST_PACKAGES := busybox-static python3 docker-registry skopeo

run: PACKAGES_WANTED = $(PACKAGES)
run: packages build
	target/debug/harvest quickstart

test: PACKAGES_WANTED = $(PACKAGES) $(TEST_PACKAGES)
test: packages build images
	@if cargo nextest --version >/dev/null 2>&1; \
	then cargo nextest run --workspace; \
	else cargo test --workspace; fi

build:
	cargo supervisor
	cargo build --workspace --bins

# The image of tests and demo; milliseconds once it is in the user's cache folder.
images: build
	target/debug/harvest image build claude

packages:
	@missing=$$(dpkg-query -W -f '$${Package} $${db:Status-Status}\n' $(PACKAGES_WANTED) 2>/dev/null \
	  | awk '$$2=="installed"{print $$1}' | sort > .packages.tmp; \
	  printf '%s\n' $(PACKAGES_WANTED) | sort | comm -23 - .packages.tmp; rm -f .packages.tmp); \
	if [ -n "$$missing" ]; then \
	  echo "installing $$missing"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends $$missing; \
	fi
