//! Which synthetic address stands for which name. An address is never given to a second name: a
//! connection that comes late, or an address kept in a cache, can only mean the name it was made for.

use std::{cell::RefCell, collections::HashMap, net::Ipv4Addr};

use harvest_proto::door::{GIT_NAME, MODEL_NAME};

// 198.18.0.1 is the resolver itself.
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 2]);

// Far more than honest work looks up; a bound on what a hostile sandbox can make us remember.
const MAX_NAMES: usize = 16 * 1024;

/// The names looked up so far.
#[derive(Debug)]
pub(super) struct Names {
    table: RefCell<Table>,
}

#[derive(Debug, Default)]
struct Table {
    addresses: HashMap<String, Ipv4Addr>,
    names: Vec<String>,
}

impl Default for Names {
    // The gateway's own names are known from the start: they resolve even while it is away.
    fn default() -> Self {
        let names = Self { table: RefCell::default() };
        for name in [MODEL_NAME, GIT_NAME] {
            names.give(name);
        }
        names
    }
}

impl Names {
    /// The address this name has already.
    pub(super) fn known(&self, name: &str) -> Option<Ipv4Addr> {
        self.table.borrow().addresses.get(name).copied()
    }

    /// The address of this name, a new one if it has none; `None` when there are too many names.
    pub(super) fn give(&self, name: &str) -> Option<Ipv4Addr> {
        if let Some(address) = self.known(name) {
            return Some(address);
        }
        let table = &mut *self.table.borrow_mut();
        if table.names.len() >= MAX_NAMES {
            return None;
        }
        let address = Ipv4Addr::from(FIRST + u32::try_from(table.names.len()).ok()?);
        table.names.push(name.to_owned());
        table.addresses.insert(name.to_owned(), address);
        Some(address)
    }

    /// The name this address stands for.
    pub(super) fn name(&self, address: Ipv4Addr) -> Option<String> {
        let index = usize::try_from(u32::from(address).checked_sub(FIRST)?).ok()?;
        self.table.borrow().names.get(index).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address_and_no_other_gets_it() {
        let names = Names::default();
        let one = names.give("one.example").unwrap();
        let other = names.give("other.example").unwrap();
        assert_ne!(one, other);
        assert_eq!(names.give("one.example"), Some(one));
        assert_eq!(names.name(one).as_deref(), Some("one.example"));
        assert_eq!(names.name(Ipv4Addr::new(198, 18, 0, 2)).as_deref(), Some(MODEL_NAME));
        assert_eq!(names.name(Ipv4Addr::new(198, 18, 0, 1)), None);
        assert_eq!(names.name(Ipv4Addr::new(198, 19, 255, 255)), None);
    }

    #[test]
    fn too_many_names_are_refused_and_the_old_ones_stay() {
        let names = Names::default();
        for number in 2..MAX_NAMES {
            assert!(names.give(&format!("{number}.example")).is_some());
        }
        assert_eq!(names.give("one.too.many"), None);
        assert!(names.known("2.example").is_some());
    }
}
