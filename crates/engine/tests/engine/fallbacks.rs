//! Tests of fallbacks for missing host features, on a host that has them.

use super::{door::assert_door_is_the_only_way, *};

/// Starts a zygote that must not use nftables.
#[test]
fn door_works_through_iptables_without_nftables() {
    assert_door_is_the_only_way(&World::with_zygote("", &["--without", "nftables"]));
}
