//! The ways around what a lesser host lacks, taken on this one.

use super::{door::the_door_is_the_only_way, *};

/// Its zygote believes that the host has none.
#[test]
fn without_nftables_the_door_is_reached_through_the_older_tables() {
    the_door_is_the_only_way(&World::with_zygote("", &["--without", "nftables"]));
}
