//! Addresses that the gateway connects to for a sandbox: public ones only. A name in the policy
//! that resolves to the machine, its network or its cloud's metadata service is refused.
//! Documentation addresses are allowed: they belong to no one, and a network that answers on them
//! has put a mirror there on purpose.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

// Azure answers metadata requests on this public-looking address.
const AZURE_WIRE_SERVER: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);

// Clouds answer metadata requests on these unique-local addresses: Google, Oracle, Scaleway. Amazon
// has a whole network of such services, `fd00:ec2::/32`.
const METADATA_V6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
    Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),
];

#[must_use]
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// Whether an address is of this machine or of a private network, and not of a cloud's metadata
/// service.
#[must_use]
pub(crate) fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_private() || address.is_loopback(),
        IpAddr::V6(address) => {
            let metadata =
                METADATA_V6.contains(&address) || address.segments()[..2] == [0xfd00, 0xec2];
            (address.is_unique_local() && !metadata) || address.is_loopback()
        }
    }
}

// Blocks of RFC 6890 and its successors that are not for global use.
fn is_public_v4(address: Ipv4Addr) -> bool {
    let special = match address.octets() {
        [0 | 10 | 127, ..] => true,
        [100, second, ..] => second & 0xc0 == 64, // carrier-grade NAT
        [169, 254, ..] => true,                   // link-local, and most clouds' metadata
        [172, second, ..] => second & 0xf0 == 16,
        [192, 0, 0, _] | [192, 88, 99, _] | [192, 168, ..] => true,
        [198, 18 | 19, ..] => true, // benchmarks; sandboxes get synthetic addresses from it
        [224..=255, ..] => true,    // multicast, reserved, broadcast
        _ => false,
    };
    !special && address != AZURE_WIRE_SERVER
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    // Only 2000::/3 is assigned for global use; this excludes loopback, mapped IPv4, unique-local,
    // link-local and multicast.
    let global = segments[0] & 0xe000 == 0x2000;
    let special = match segments {
        [0x2001, second, ..] => second < 0x200, // Teredo and other protocols
        [0x2002, ..] => true,                   // 6to4 carries an IPv4 address
        _ => false,
    };
    global && !special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_service_is_not_a_private_network() {
        let private = |text: &str| is_private(text.parse().unwrap());
        for yes in ["10.1.2.3", "192.168.0.1", "172.16.0.1", "127.0.0.1", "::1", "fd00::1"] {
            assert!(private(yes), "{yes}");
        }
        for no in [
            "169.254.169.254",
            "168.63.129.16",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "0.0.0.0",
            "fe80::1",
            "224.0.0.1",
            "8.8.8.8",
        ] {
            assert!(!private(no), "{no}");
        }
    }

    #[test]
    fn public_addresses_are_public() {
        for public in [
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "198.20.0.1",
            "203.0.113.7",
            "2606:4700::1111",
            "2a00::1",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
    }

    #[test]
    fn private_and_metadata_addresses_are_not_public() {
        for private in [
            "0.0.0.0",
            "10.1.2.3",
            "127.0.0.1",
            "127.9.9.9",
            "100.100.100.200",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "192.0.0.1",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "168.63.129.16",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "2002:7f00:1::",
            "2001::1",
            "64:ff9b::7f00:1",
            "::127.0.0.1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
    }
}
