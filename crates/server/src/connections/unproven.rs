//! Connections that have not proved a valid token. A connection without one may be closed for a new
//! one, so that silent sockets never lock out callers with a token.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio_util::sync::CancellationToken;

/// The connections without a valid token, by the order in which they were accepted.
#[derive(Debug, Clone)]
pub(super) struct Unproven {
    /// The most for one address.
    per_address: usize,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    connections: BTreeMap<u64, Arc<Connection>>,
}

#[derive(Debug)]
struct Connection {
    address: IpAddr,
    /// A request is in flight: its token is being checked, or its response being sent.
    busy: AtomicBool,
    close: CancellationToken,
}

/// The entry of one connection, removed on drop.
#[derive(Debug)]
pub(super) struct UnprovenGuard {
    owner: Unproven,
    id: u64,
    connection: Arc<Connection>,
}

impl Unproven {
    pub(super) fn new(per_address: usize) -> Self {
        Self { per_address: per_address.max(1), table: Arc::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a connection. Closes the oldest of its address when there are too many.
    pub(super) fn enter(&self, address: IpAddr) -> UnprovenGuard {
        let connection = Arc::new(Connection {
            address,
            busy: AtomicBool::new(false),
            close: CancellationToken::new(),
        });
        let mut table = self.table();
        let same = table.connections.values().filter(|one| one.address == address).count();
        if same >= self.per_address {
            table.close_oldest(|one| one.address == address);
        }
        let id = table.next;
        table.next += 1;
        table.connections.insert(id, Arc::clone(&connection));
        UnprovenGuard { owner: self.clone(), id, connection }
    }

    /// Closes the oldest idle connection; false when there is none.
    pub(super) fn close_oldest(&self) -> bool {
        self.table().close_oldest(|_| true)
    }
}

impl Table {
    fn close_oldest(&mut self, fits: impl Fn(&Connection) -> bool) -> bool {
        let idle = |one: &Connection| !one.busy.load(Ordering::SeqCst);
        let oldest = self.connections.iter().find(|(_, one)| fits(one) && idle(one));
        let Some(id) = oldest.map(|(id, _)| *id) else { return false };
        if let Some(connection) = self.connections.remove(&id) {
            connection.close.cancel();
        }
        true
    }
}

impl UnprovenGuard {
    /// Cancelled when the connection must make room.
    pub(super) fn closed(&self) -> CancellationToken {
        self.connection.close.clone()
    }

    pub(super) fn set_busy(&self, busy: bool) {
        self.connection.busy.store(busy, Ordering::SeqCst);
    }

    /// The connection has sent a valid token: it is never closed for another one.
    pub(super) fn prove(&self) {
        self.owner.table().connections.remove(&self.id);
    }
}

impl Drop for UnprovenGuard {
    fn drop(&mut self) {
        self.prove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn is_closed(guard: &UnprovenGuard) -> bool {
        guard.closed().is_cancelled()
    }

    #[test]
    fn address_beyond_its_limit_loses_its_oldest_connection() {
        let unproven = Unproven::new(2);
        let guards: Vec<_> = [1, 2, 1, 1].map(|last| unproven.enter(address(last))).into();
        let closed: Vec<bool> = guards.iter().map(is_closed).collect();
        assert_eq!(closed, [true, false, false, false]);
    }

    #[test]
    fn busy_and_proven_connections_stay() {
        let unproven = Unproven::new(9);
        let guards: Vec<_> = (0..4).map(|_| unproven.enter(address(1))).collect();
        guards[0].set_busy(true);
        guards[1].prove();
        assert!(unproven.close_oldest() && is_closed(&guards[2]));
        assert!(unproven.close_oldest() && is_closed(&guards[3]));
        assert!(!unproven.close_oldest());
        assert!(!is_closed(&guards[0]) && !is_closed(&guards[1]));
    }

    #[test]
    fn closed_connections_leave_the_table() {
        let unproven = Unproven::new(9);
        drop(unproven.enter(address(1)));
        assert!(!unproven.close_oldest());
    }
}
