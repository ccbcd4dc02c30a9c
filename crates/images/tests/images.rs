//! Builds, imports and pulls with real sandboxes and registries. Needs root, a static
//! `/bin/busybox`, the supervisor (`cargo supervisor`), the zygote (`cargo build -p
//! harvest-engine`), skopeo and docker-registry.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "images/builds.rs"]
mod builds;
#[path = "images/failures.rs"]
mod failures;
#[path = "images/imports.rs"]
mod imports;
#[path = "images/pulls.rs"]
mod pulls;
#[path = "images/registries.rs"]
mod registries;
#[path = "images/world.rs"]
mod world;
