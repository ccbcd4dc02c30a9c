//! Maps names to synthetic addresses. An address is never reused for another name, so a late
//! connection or a cached address always means the original name.

use std::{cell::RefCell, collections::HashMap, net::Ipv4Addr};

use harvest_proto::door::{GIT_NAME, MCP_NAME, MODEL_NAME};

// 198.18.0.1 is the resolver itself.
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 2]);

// Bounds the memory a hostile sandbox can use; far more than real work looks up.
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
    // The gateway's own names resolve even while it is down.
    fn default() -> Self {
        let names = Self { table: RefCell::default() };
        for name in [MODEL_NAME, GIT_NAME, MCP_NAME] {
            names.assign(name);
        }
        names
    }
}

impl Names {
    /// The address already assigned to this name.
    pub(super) fn lookup(&self, name: &str) -> Option<Ipv4Addr> {
        self.table.borrow().addresses.get(name).copied()
    }

    /// The address of this name, assigned if needed; `None` when there are too many names.
    pub(super) fn assign(&self, name: &str) -> Option<Ipv4Addr> {
        if let Some(address) = self.lookup(name) {
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
    fn every_name_keeps_its_own_address() {
        let names = Names::default();
        let one = names.assign("one.example").unwrap();
        let other = names.assign("other.example").unwrap();
        assert_ne!(one, other);
        assert_eq!(names.assign("one.example"), Some(one));
        assert_eq!(names.name(one).as_deref(), Some("one.example"));
        assert_eq!(names.name(Ipv4Addr::new(198, 18, 0, 2)).as_deref(), Some(MODEL_NAME));
        assert_eq!(names.name(Ipv4Addr::new(198, 18, 0, 1)), None);
        assert_eq!(names.name(Ipv4Addr::new(198, 19, 255, 255)), None);
    }

    #[test]
    fn excess_names_are_rejected() {
        let names = Names::default();
        for number in 3..MAX_NAMES {
            assert!(names.assign(&format!("{number}.example")).is_some());
        }
        assert_eq!(names.assign("one.too.many"), None);
        assert!(names.lookup("3.example").is_some());
    }
}
